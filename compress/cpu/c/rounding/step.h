/* Rows of learned rounding, compiled for one instruction set; included behind search.h. */
#ifndef NATIVE_ROUNDING_STEP_H
#define NATIVE_ROUNDING_STEP_H

#include "rounding/learned.h"
#include "rounding/search.h"

/* The constants of a group. */
typedef struct {
    Strip scale, low, high;
} Codes;

INLINE Codes codes_of(const LearnedRounding *w, int64_t group) {
    const float zero = w->zeros[group];
    return (Codes){strip_of(w->scales[group]), strip_of(-zero), strip_of(w->max_code - zero)};
}

INLINE Strip nearest(Strip x) { return (x + strip_of(ROUNDING)) - strip_of(ROUNDING); }

INLINE void value_row(const LearnedRounding *w, int64_t row) {
    const int64_t groups = w->columns / w->group;
    for (int64_t g = 0; g < groups; g++) {
        const Codes codes = codes_of(w, row * groups + g);
        const int64_t first = row * w->columns + g * w->group;
        for (int64_t at = 0; at < w->group; at += STRIP_WIDTH) {
            const int64_t left = w->group - at;
            const Strip exact = strip_load(w->latent + first + at, left) / codes.scale;
            const Strip moved = nearest(exact + strip_load(w->offset + first + at, left));
            const Strip values = strip_clamp(moved, codes.low, codes.high) * codes.scale;
            memcpy(w->values + first + at, &values, (size_t)(left < STRIP_WIDTH ? left : STRIP_WIDTH) * sizeof(float));
        }
    }
}

INLINE float sum_of(const Strip *parts) {
    float sums[LANES];
    memcpy(sums, parts, sizeof sums);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

/* Moves the offsets of a strip; adds what its weights give to the gradients of the scale and of the zero point. */
INLINE void step_strip(const LearnedRounding *w, const Codes *codes, int64_t at, int64_t left, Strip *stretched, Strip *shifted) {
    const size_t bytes = (size_t)(left < STRIP_WIDTH ? left : STRIP_WIDTH) * sizeof(float);
    const Strip zero = {0}, offset = strip_load(w->offset + at, left), gradient = strip_load(w->gradient + at, left);
    const Strip exact = strip_load(w->latent + at, left) / codes->scale, moved = nearest(exact + offset);
    const Strip code = strip_clamp(moved, codes->low, codes->high);
    const Strip free = (Strip)((moved == code) & (StripBits)gradient), move = free * codes->scale;
    *stretched += gradient * code - free * exact;
    *shifted += free - gradient;
    const Strip sign = __builtin_convertvector((move < zero) - (move > zero), Strip);
    const Strip limit = strip_of(w->limit), result = strip_clamp(offset - strip_of(w->rate) * sign, -limit, limit);
    memcpy(w->offset + at, &result, bytes);
}

INLINE void step_row(const LearnedRounding *w, int64_t row) {
    const int64_t groups = w->columns / w->group;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t group = row * groups + g, first = row * w->columns + g * w->group;
        const Codes codes = codes_of(w, group);
        Strip stretched[STRIPS] = {0}, shifted[STRIPS] = {0};
        for (int64_t at = 0; at < w->group; at += LANES)
            for (int strip = 0; strip < STRIPS; strip++) {
                const int64_t inner = at + strip * STRIP_WIDTH;
                if (inner < w->group) step_strip(w, &codes, first + inner, w->group - inner, &stretched[strip], &shifted[strip]);
            }
        w->stretched[group] = sum_of(stretched);
        w->shifted[group] = sum_of(shifted) * w->scales[group];
    }
}

#endif
