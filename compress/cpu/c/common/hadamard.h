/* Hadamard matrices of Sylvester's construction, divided by the root of their order. */
#ifndef NATIVE_HADAMARD_H
#define NATIVE_HADAMARD_H

#include <math.h>

#include "common/simd.h"

/* Times such matrices in place, as rotate_heads of compress/checkpoint/kv_quant.py: every `block` numbers, a power of two,
 * each by itself. LANES divides `size`. */
INLINE void hadamard_blocks(float *x, int64_t size, int64_t block) {
    for (int64_t half = 1; half < block; half *= 2)
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
