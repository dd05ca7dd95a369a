/* Hadamard matrices of Sylvester's construction, divided by the root of their order. */
#ifndef NATIVE_HADAMARD_H
#define NATIVE_HADAMARD_H

#include <math.h>

#include "common/simd.h"

/* LANES numbers times the matrix of their order, not divided: at each level the numbers with one bit of their place swapped, plus
 * or minus themselves. */
INLINE Lanes hadamard_lanes(Lanes x) {
    const IntLanes place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int level = 0; level < 4; level++) {
        const IntLanes bit = place >> level & 1, from = place ^ 1 << level;
#if defined(__clang__)
        Lanes swapped = x;
        for (int i = 0; i < LANES; i++) swapped[i] = x[from[i]];
#else
        const Lanes swapped = __builtin_shuffle(x, from);
#endif
        x = swapped + (Lanes)((WordLanes)x ^ (WordLanes)bit << 31);
    }
    return x;
}

/* Times such matrices in place, as rotate_heads of compress/checkpoint/kv_quant.py: every `block` numbers, a power of two,
 * each by itself. LANES divides `size`. */
INLINE void hadamard_blocks(float *x, int64_t size, int64_t block) {
    int64_t half = 1;
    if (block >= LANES) {
        for (int64_t i = 0; i < size; i += LANES) lanes_store(x + i, hadamard_lanes(lanes_load(x + i)));
        for (half = LANES; half < block; half *= 2)
            for (int64_t first = 0; first < size; first += 2 * half)
                for (int64_t i = first; i < first + half; i += LANES) {
                    const Lanes low = lanes_load(x + i), high = lanes_load(x + i + half);
                    lanes_store(x + i, low + high);
                    lanes_store(x + i + half, low - high);
                }
    }
    for (; half < block; half *= 2)
        for (int64_t first = 0; first < size; first += 2 * half)
            for (int64_t i = first; i < first + half; i++) {
                const float sum = x[i] + x[i + half];
                x[i + half] = x[i] - x[i + half];
                x[i] = sum;
            }
    const Lanes norm = lanes_of(sqrtf((float)block));
    for (int64_t i = 0; i < size; i += LANES) lanes_store(x + i, lanes_load(x + i) / norm);
}

#endif
