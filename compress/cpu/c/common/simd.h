/* Sixteen floats side by side, in plain C: the compiler makes of them what the instruction set of the function that they
 * are inlined into has, one register of AVX-512, two of AVX2 or four of SSE. Every function here rounds like IEEE 754
 * asks for each lane, so one source gives the same numbers everywhere (multiplications and additions are not fused).
 */
#ifndef NATIVE_LANES_H
#define NATIVE_LANES_H

#include <stdint.h>
#include <string.h>

#include "common/dispatch.h"

enum { LANES = 16 };

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t WordLanes __attribute__((vector_size(64)));

INLINE Lanes lanes_of(float x) {
    return x - (Lanes){0};
}

INLINE Lanes lanes_load(const float *from) {
    Lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void lanes_store(float *to, Lanes x) {
    memcpy(to, &x, sizeof x);
}

/* The first `count` lanes, at most all of them; `rest` in the others. */
INLINE Lanes lanes_load_some(const float *from, int64_t count, float rest) {
    Lanes x = lanes_of(rest);
    memcpy(&x, from, (size_t)(count < LANES ? count : LANES) * sizeof *from);
    return x;
}

/* Conditions are all bits or none per lane. They are made from sign bits: compilers take comparisons of lanes apart. */
INLINE Lanes lanes_select(IntLanes condition, Lanes yes, Lanes no) {
    return (Lanes)((condition & (IntLanes)yes) | (~condition & (IntLanes)no));
}

INLINE IntLanes lanes_negative(IntLanes x) { return x >> 31; }

/* a < b, for numbers whose difference is one. */
INLINE IntLanes lanes_below(Lanes a, Lanes b) { return lanes_negative((IntLanes)(a - b)); }

INLINE Lanes lanes_max(Lanes a, Lanes b) { return lanes_select(lanes_below(a, b), b, a); }

INLINE IntLanes lanes_nan(Lanes x) { return lanes_negative(0x7f800000 - ((IntLanes)x & 0x7fffffff)); }

INLINE Lanes lanes_clamp(Lanes x, float low, float high) {
    x = lanes_max(x, lanes_of(low));
    return lanes_select(lanes_below(lanes_of(high), x), lanes_of(high), x);
}

/* To the nearest whole number, half to even; for magnitudes below 2^22. */
INLINE Lanes lanes_round(Lanes x) {
    Lanes shift = lanes_of(12582912.0f); /* 1.5 * 2^23: no bits are left behind the point */
    return (x + shift) - shift;
}

/* e^x for x <= 0, within 2 units in the last place; what is below -87 counts as -87, and NaN stays. */
INLINE Lanes lanes_exp(Lanes x) {
    Lanes near = lanes_max(x, lanes_of(-87.0f));
    Lanes n = lanes_round(near * lanes_of(1.44269504f));
    Lanes r = near - n * lanes_of(0.693359375f) + n * lanes_of(2.12194440e-4f); /* ln 2 in two pieces */
    Lanes p = lanes_of(1.9875691e-4f);
    p = p * r + lanes_of(1.3981999e-3f);
    p = p * r + lanes_of(8.3334519e-3f);
    p = p * r + lanes_of(4.1665796e-2f);
    p = p * r + lanes_of(1.6666665e-1f);
    p = p * r + lanes_of(5.0000000e-1f);
    p = p * r * r + r + lanes_of(1.0f);
    return p * (Lanes)((__builtin_convertvector(n, IntLanes) + 127) << 23) + x * lanes_of(0.0f);
}

/* 1 / (1 + e^-x); e^-|x| cannot overflow. */
INLINE Lanes lanes_sigmoid(Lanes x) {
    const IntLanes negative = lanes_negative((IntLanes)x);
    const Lanes small = lanes_exp(lanes_select(negative, x, -x)), one = lanes_of(1.0f);
    return lanes_select(negative, small, one) / (one + small);
}

INLINE float highest_lane(Lanes x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

INLINE float sum_of_lanes(Lanes x) {
    float half[8], sum = 0;
    for (int lane = 0; lane < 8; lane++) half[lane] = x[lane] + x[lane + 8];
    for (int lane = 0; lane < 8; lane++) sum += half[lane];
    return sum;
}

#endif
