/* Decoding and multiplying, compiled for one instruction set. Files that include this begin with a pragma for its target (what is
 * only inlined into a function for a target is taken apart by GCC before), define TARGET, the attribute that Clang asks for,
 * PER_VECTOR, lanes of a vector, and MOST_ROWS, rows whose sums registers hold, and then
 *     floats_fma(a, b, c)    a * b + c
 *     byte_sums(words)       1024 + the sum of the four bytes of each word
 * before they include kernel.inc. */
#ifndef NATIVE_TRELLIS_KERNEL_H
#define NATIVE_TRELLIS_KERNEL_H

#include <string.h>

#include "common/bf16.h"
#include "trellis/parts.h"

typedef float Floats __attribute__((vector_size(4 * PER_VECTOR)));
typedef uint32_t Words __attribute__((vector_size(4 * PER_VECTOR)));
typedef int32_t Integers __attribute__((vector_size(4 * PER_VECTOR)));

INLINE TARGET Floats floats_all(float x) { return x - (Floats){0}; }
INLINE TARGET Floats floats_load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE TARGET void floats_store(float *to, Floats x) { memcpy(to, &x, sizeof x); }
INLINE TARGET Words words_load(const uint32_t *from) {
    Words x;
    memcpy(&x, from, sizeof x);
    return x;
}

#endif
