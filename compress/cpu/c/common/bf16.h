/* Sixteen-bit floats, one by one and in lanes, and the bits of floats. */
#ifndef NATIVE_BF16_H
#define NATIVE_BF16_H

#include <stdint.h>
#include <string.h>

#include "common/simd.h"

INLINE float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of_bfloat16(uint16_t x) { return float_of_bits((uint32_t)x << 16); }

/* Half to even; NaN stays NaN. */
INLINE uint16_t bfloat16_of(float x) {
    uint32_t bits = bits_of_float(x);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Bits of a finite number within float16's range, or NaN. Half to even. */
INLINE uint16_t float16_of(float x) {
    const uint32_t bits = bits_of_float(x), size = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (x != x) return sign | 0x7e00;
    if (size < 0x38800000) { /* below 2^-14 float16 counts in steps of 2^-24 */
        const float steps = float_of_bits(size) * 16777216.0f;
        return sign | (uint16_t)((steps + 12582912.0f) - 12582912.0f);
    }
    return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

/* Written without small intermediate numbers, which are flushed to zero where kernels run. */
INLINE float float_of_float16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, size = x & 0x7fff;
    if (size >= 0x7c00) return float_of_bits(sign | 0x7f800000 | size << 13); /* infinity, NaN */
    const float magnitude = size < 0x400 ? (float)size * 0x1p-24f : float_of_bits((size << 13) + 0x38000000);
    return sign ? -magnitude : magnitude;
}

typedef uint16_t HalfLanes __attribute__((vector_size(32)));

INLINE Lanes lanes_load_bfloat16(const uint16_t *from) {
    HalfLanes halves;
    memcpy(&halves, from, sizeof halves);
    return (Lanes)(__builtin_convertvector(halves, WordLanes) << 16);
}

/* The bits of bfloat16 numbers in the upper halves of words, zeros below: `x` rounded, as floats. */
INLINE Lanes lanes_round_bfloat16(Lanes x) {
    WordLanes bits = (WordLanes)x;
    WordLanes rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return lanes_select(lanes_nan(x), (Lanes)((bits | 0x400000) & 0xffff0000u), (Lanes)rounded);
}

INLINE void lanes_store_bfloat16(uint16_t *to, Lanes x) {
    HalfLanes halves = __builtin_convertvector((WordLanes)lanes_round_bfloat16(x) >> 16, HalfLanes);
    memcpy(to, &halves, sizeof halves);
}

/* Written without small intermediate numbers, which are flushed to zero where kernels run. */
INLINE Lanes lanes_load_float16(const uint16_t *from) {
    HalfLanes halves;
    memcpy(&halves, from, sizeof halves);
    WordLanes bits = __builtin_convertvector(halves, WordLanes), size = bits & 0x7fff;
    Lanes normal = (Lanes)((size << 13) + 0x38000000);
    Lanes special = (Lanes)((size << 13) + 0x70000000);
    Lanes tiny = __builtin_convertvector(size, Lanes) * lanes_of(5.9604644775390625e-8f);
    Lanes magnitude = lanes_select(lanes_negative((IntLanes)size - 0x400), tiny, normal);
    magnitude = lanes_select(lanes_negative(0x7bff - (IntLanes)size), special, magnitude);
    return (Lanes)((WordLanes)magnitude | (bits & 0x8000) << 16);
}

#endif
