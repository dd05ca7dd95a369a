/* Sixteen floats side by side, in plain C: the compiler makes of them what the instruction set of the function that they
 * are inlined into has, one register of AVX-512, two of AVX2 or four of SSE. Every function here rounds like IEEE 754
 * asks for each lane, so one source gives the same numbers everywhere (multiplications and additions are not fused).
 */
#ifndef NATIVE_LANES_H
#define NATIVE_LANES_H

#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t WordLanes __attribute__((vector_size(64)));

ALWAYS_INLINE Lanes lanes_of(float x) {
    return x - (Lanes){0};
}

ALWAYS_INLINE Lanes lanes_load(const float *from) {
    Lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

ALWAYS_INLINE void lanes_store(float *to, Lanes x) {
    memcpy(to, &x, sizeof x);
}

/* The first `count` lanes, at most all of them; `rest` in the others. */
ALWAYS_INLINE Lanes lanes_load_some(const float *from, int64_t count, float rest) {
    Lanes x = lanes_of(rest);
    memcpy(&x, from, (size_t)(count < LANES ? count : LANES) * sizeof *from);
    return x;
}

/* Conditions are all bits or none per lane. They are made from sign bits: compilers take comparisons of lanes apart. */
ALWAYS_INLINE Lanes lanes_select(IntLanes condition, Lanes yes, Lanes no) {
    return (Lanes)((condition & (IntLanes)yes) | (~condition & (IntLanes)no));
}

ALWAYS_INLINE IntLanes lanes_negative(IntLanes x) { return x >> 31; }

/* a < b, for numbers whose difference is one. */
ALWAYS_INLINE IntLanes lanes_below(Lanes a, Lanes b) { return lanes_negative((IntLanes)(a - b)); }

ALWAYS_INLINE Lanes lanes_max(Lanes a, Lanes b) { return lanes_select(lanes_below(a, b), b, a); }

ALWAYS_INLINE Lanes lanes_clamp(Lanes x, float low, float high) {
    x = lanes_max(x, lanes_of(low));
    return lanes_select(lanes_below(lanes_of(high), x), lanes_of(high), x);
}

/* To the nearest whole number, half to even; for magnitudes below 2^22. */
ALWAYS_INLINE Lanes lanes_round(Lanes x) {
    Lanes shift = lanes_of(12582912.0f); /* 1.5 * 2^23: no bits are left behind the point */
    return (x + shift) - shift;
}

#endif
