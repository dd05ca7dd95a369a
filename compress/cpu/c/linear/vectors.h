/* Vectors of float32 numbers and of 32-bit words, written once for all instruction sets: compilers know how to add, shift and
 * convert them. A file that includes this defines
 *     TARGET, PER_VECTOR           the attribute of its functions, and lanes of a vector
 * and after it what compilers do not know, or not well:
 *     floats_fma(a, b, c)          a * b + c
 *     floats_of_float16(address), words_of_bytes(address)    PER_VECTOR numbers
 *     Table                        the 16 entries of a table; or 16 pairs of them where activations are taken in pairs
 *     table_load(address), table_look_up(table, word, shift)    of codes from bit `shift` on, whatever is above them
 *     pair_weights(word, step, bits, table), e4m3_pairs(...)    where activations are taken in pairs: inputs 2 step and 2 step + 1 of every feature,
 *                                  as bfloat16 numbers
 *     words_dot(sum, codes, q8, bits)    sum + products of 4 unsigned bytes, codes of `bits`, with 4 signed ones
 *     floats_quad(address)         four floats, again and again
 *     floats_pick(quad, word, shift)    of each quad the one that the two bits at `shift` name
 *     floats_at_place(word, shift, place, x)    x where these two bits are `place`, 0 elsewhere */
#ifndef NATIVE_LINEAR_VECTORS_H
#define NATIVE_LINEAR_VECTORS_H

#include "linear/tiles.h"

typedef float Floats __attribute__((vector_size(4 * PER_VECTOR)));
typedef uint32_t Words __attribute__((vector_size(4 * PER_VECTOR)));
typedef int32_t Integers __attribute__((vector_size(4 * PER_VECTOR)));
typedef uint16_t Halves __attribute__((vector_size(2 * PER_VECTOR)));

INLINE TARGET Floats floats_all(float x) { return x - (Floats){0}; }
INLINE TARGET Words words_all(uint32_t x) { return x - (Words){0}; }
INLINE TARGET Floats floats_load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE TARGET Words words_load(const uint32_t *from) {
    Words x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE TARGET void floats_store(float *to, Floats x) { memcpy(to, &x, sizeof x); }
INLINE TARGET void words_store(uint32_t *to, Words x) { memcpy(to, &x, sizeof x); }

/* Conversion of signed integers. */
INLINE TARGET Floats floats_of(Words x) { return __builtin_convertvector((Integers)x, Floats); }
INLINE TARGET Floats floats_of_bfloat16(const uint16_t *from) {
    Halves x;
    memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
}

/* The e4m3 float at `shift`. Its exponent is moved to that of float32, as if all numbers had a leading one; those below 2^-6 have
 * none, and are doubled less 2^-6. No intermediate number is denormal. */
INLINE TARGET Floats floats_of_e4m3(Words word, int shift) {
    const Words top = word << (24 - shift);
    const Floats size = (Floats)((top >> 4 & 0x07f00000) + 0x3c000000);
    const Integers beyond = (Integers)(size - floats_all(0x1p-6f));
    const Floats lacking = (Floats)(beyond & beyond >> 31);
    return (Floats)((Words)(size + lacking) | (top & 0x80000000u));
}

/* The code of 8 bits at `shift`, less its middle: as the lowest bits of 2^23, which is quicker than a conversion. */
INLINE TARGET Floats floats_centred(Words word, int shift) {
    return (Floats)((word >> shift & 255) | 0x4b000000) - floats_all(8388608.0f + 128.0f);
}

#endif
