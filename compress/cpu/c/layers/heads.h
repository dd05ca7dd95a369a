/* Operations on one row of bfloat16 numbers, mostly a head of a token, between the products of a layer. Inlined into
 * the functions of each instruction set; numbers are rounded where norm_rope_act.h says. */
#ifndef NATIVE_HEADS_H
#define NATIVE_HEADS_H

#include <math.h>

#include "kv/kv_pages.h"
#include "common/bf16.h"
#include "common/hadamard.h"

/* One over the root of the mean square. */
INLINE float norm_factor(const uint16_t *x, int64_t size, float eps) {
    Lanes sum[2] = {{0}, {0}};
    for (int64_t i = 0; i < size; i += LANES) {
        const Lanes value = lanes_load_bfloat16(x + i);
        sum[i / LANES % 2] += value * value;
    }
    return 1.0f / sqrtf(sum_of_lanes(sum[0] + sum[1]) / (float)size + eps);
}

/* Writes x / sqrt(mean square + eps) * weight; x and out may be the same. */
INLINE void normalize(const uint16_t *x, const uint16_t *weight, int64_t size, float eps, uint16_t *out) {
    const Lanes factor = lanes_of(norm_factor(x, size, eps));
    for (int64_t i = 0; i < size; i += LANES)
        lanes_store_bfloat16(out + i, lanes_round_bfloat16(lanes_load_bfloat16(x + i) * factor) * lanes_load_bfloat16(weight + i));
}

/* As `normalize`, rounded once. */
INLINE void normalize_wide(const uint16_t *x, const float *weight, int64_t size, float eps, uint16_t *out) {
    const Lanes factor = lanes_of(norm_factor(x, size, eps));
    for (int64_t i = 0; i < size; i += LANES)
        lanes_store_bfloat16(out + i, lanes_load_bfloat16(x + i) * factor * lanes_load(weight + i));
}

/* Rotary embedding in place: x * cos + (x with its halves exchanged) * sin. */
INLINE void rotate_head(uint16_t *x, int64_t size, const uint16_t *cos, const uint16_t *sin) {
    uint16_t before[LONGEST_HEAD];
    memcpy(before, x, (size_t)size * sizeof *x);
    for (int64_t d = 0; d < size; d += LANES) {
        const Lanes other = lanes_load_bfloat16(before + (2 * d < size ? d + size / 2 : d - size / 2));
        const Lanes crossed = lanes_round_bfloat16(other * lanes_load_bfloat16(sin + d));
        const Lanes straight = lanes_round_bfloat16(lanes_load_bfloat16(before + d) * lanes_load_bfloat16(cos + d));
        lanes_store_bfloat16(x + d, crossed + straight);
    }
}

/* Times Hadamard matrices of the largest power of two that divides `size`, in place. */
INLINE void hadamard_wide(float *rotated, int64_t size) { hadamard_blocks(rotated, size, size & -size); }

INLINE void hadamard_head(uint16_t *x, int64_t size) {
    float rotated[LONGEST_HEAD];
    for (int64_t d = 0; d < size; d += LANES) lanes_store(rotated + d, lanes_load_bfloat16(x + d));
    hadamard_wide(rotated, size);
    for (int64_t d = 0; d < size; d += LANES) lanes_store_bfloat16(x + d, lanes_load(rotated + d));
}

#endif
