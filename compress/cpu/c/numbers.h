/* Sixteen-bit floats in lanes; one by one: scalars.h. */
#ifndef NATIVE_NUMBERS_H
#define NATIVE_NUMBERS_H

#include "lanes.h"
#include "scalars.h"

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
    IntLanes is_nan = lanes_negative(0x7f800000 - (IntLanes)(bits & 0x7fffffff));
    return lanes_select(is_nan, (Lanes)((bits | 0x400000) & 0xffff0000u), (Lanes)rounded);
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
