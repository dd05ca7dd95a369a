/* The search and the rounding of groups, compiled for one instruction set. Files that include this begin with a pragma for their
 * target (what is only inlined into a function for a target is taken apart by GCC before), and define
 *     STRIP_WIDTH               floats in a register
 *     Strip, StripBits          vectors of STRIP_WIDTH floats and 32-bit words
 *     CodeStrip                 a vector of STRIP_WIDTH bytes
 *     strip_clamp(x, low, high) low <= high
 */
#ifndef NATIVE_ROUNDING_SEARCH_H
#define NATIVE_ROUNDING_SEARCH_H

#include "common/bf16.h"
#include "rounding/tasks.h"

enum { STRIPS = LANES / STRIP_WIDTH, TOGETHER = 4 };

static const float TINY = 0x1p-126f;
static const float ROUNDING = 12582912.0f; /* 1.5 * 2^23: adding it leaves no bits behind the point */

INLINE Strip strip_of(float x) { return x - (Strip){0}; }

/* The first `count` floats, zeros behind them. */
INLINE Strip strip_load(const float *from, int64_t count) {
    Strip x = {0};
    if (count >= STRIP_WIDTH)
        memcpy(&x, from, sizeof x);
    else if (count > 0)
        memcpy(&x, from, (size_t)count * sizeof *from);
    return x;
}

/* Scales and zero points to try, in the order of preference; behind them the last one again, which is never better. */
typedef struct {
    float scale[MOST_TRIALS], inverse[MOST_TRIALS], zero[MOST_TRIALS];
} Trials;

typedef struct {
    const float *weight, *importance;
    float low, high; /* low <= 0 <= high */
} Group;

typedef struct {
    float scale, zero, error;
} Range;

INLINE int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

INLINE float smaller(float a, float b) { return a < b ? a : b; }
INLINE float larger(float a, float b) { return a > b ? a : b; }

INLINE float stored_as(int64_t dtype, float scale) {
    if (dtype == SCALES_BFLOAT16) return float_of_bfloat16(bfloat16_of(scale));
    if (dtype == SCALES_FLOAT16) return float_of_float16(float16_of(scale));
    return scale;
}

INLINE void round_as(int64_t dtype, float most, float *scale, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float rounded = stored_as(dtype, smaller(larger(scale[i], -most), most));
        scale[i] = larger(rounded, -rounded) < TINY ? 1.0f : rounded;
    }
}

/* Rounds scales to the dtype that stores them; one that would be 0 becomes 1. */
INLINE void round_scales(const RangeSearch *s, Trials *trials, int64_t count) {
    if (s->scale_dtype == SCALES_BFLOAT16)
        round_as(SCALES_BFLOAT16, 0x1.fep127f, trials->scale, count);
    else if (s->scale_dtype == SCALES_FLOAT16)
        round_as(SCALES_FLOAT16, 65504.0f, trials->scale, count);
    else
        round_as(SCALES_FLOAT32, 0x1.fffffep127f, trials->scale, count);
    for (int64_t i = 0; i < count; i++) trials->inverse[i] = 1.0f / trials->scale[i];
}

/* The full range, and the parts of it that the search tries. */
INLINE void try_parts(const RangeSearch *s, const Group *group, Trials *trials) {
    const int64_t count = whole_lanes(s->parts);
    const float peak = group->high > -group->low ? group->high : group->low;
    for (int64_t i = 0; i < count; i++) {
        const float low = group->low * s->below[i], between = (group->high * s->above[i] - low) / s->max_code;
        const float steps = smaller(-low / larger(between, TINY), s->max_code);
        trials->scale[i] = s->symmetric ? peak * s->below[i] : between;
        trials->zero[i] = s->symmetric ? s->midpoint : (steps + ROUNDING) - ROUNDING;
    }
    round_scales(s, trials, count);
}

INLINE void try_neighbours(const RangeSearch *s, const Range *best, Trials *trials) {
    const int64_t count = whole_lanes(s->neighbours);
    for (int64_t i = 0; i < count; i++) {
        trials->scale[i] = best->scale * s->factor[i];
        trials->zero[i] = smaller(larger(best->zero + s->shift[i], 0.0f), s->max_code);
    }
    round_scales(s, trials, count);
}

/* The errors of trials `first` to `first + TOGETHER` over a group. */
INLINE void measure(const RangeSearch *s, const Group *group, const Trials *trials, int64_t first, float *error) {
    Strip scale[TOGETHER], inverse[TOGETHER], low[TOGETHER], high[TOGETHER];
    float sums[TOGETHER][LANES];
    Strip sum[TOGETHER][STRIPS] = {0};
    for (int each = 0; each < TOGETHER; each++) {
        scale[each] = strip_of(trials->scale[first + each]), inverse[each] = strip_of(trials->inverse[first + each]);
        low[each] = strip_of(0.0f - trials->zero[first + each]);
        high[each] = strip_of(s->max_code - trials->zero[first + each]);
    }
    for (int64_t from = 0; from < s->group; from += LANES)
        for (int strip = 0; strip < STRIPS; strip++) {
            const int64_t at = from + strip * STRIP_WIDTH, left = s->group - at;
            const Strip weight = strip_load(group->weight + at, left), importance = strip_load(group->importance + at, left);
            for (int each = 0; each < TOGETHER; each++) {
                Strip steps = strip_clamp(weight * inverse[each], low[each], high[each]);
                steps = (steps + strip_of(ROUNDING)) - strip_of(ROUNDING);
                const Strip change = steps * scale[each] - weight;
                sum[each][strip] += change * change * importance;
            }
        }
    memcpy(sums, sum, sizeof sums);
    for (int half = LANES / 2; half; half /= 2)
        for (int each = 0; each < TOGETHER; each++)
            for (int lane = 0; lane < half; lane++) sums[each][lane] += sums[each][lane + half];
    for (int each = 0; each < TOGETHER; each++) error[each] = sums[each][0];
}

/* Puts a range before the first that is worse; the last one is dropped. */
INLINE void insert(Range found, int64_t kept, Range *best) {
    int64_t place = kept - 1;
    for (; place && found.error < best[place - 1].error; place--) best[place] = best[place - 1];
    best[place] = found;
}

/* Keeps the best of several trials beside those before. */
INLINE void consider(const RangeSearch *s, const Group *group, const Trials *trials, int64_t count, Range *best) {
    float error[TOGETHER];
    for (int64_t first = 0; first < count; first += TOGETHER) {
        measure(s, group, trials, first, error);
        for (int64_t each = 0; each < TOGETHER && first + each < count; each++)
            if (error[each] < best[s->kept - 1].error)
                insert((Range){trials->scale[first + each], trials->zero[first + each], error[each]}, s->kept, best);
    }
}

INLINE Group group_at(const RangeSearch *s, int64_t row, int64_t first) {
    Group group = {s->weight + row * s->columns + first, s->importance + first, 0.0f, 0.0f};
    const Strip most = strip_of(__builtin_inff());
    Strip low = {0}, high = {0};
    for (int64_t at = 0; at < s->group; at += STRIP_WIDTH) {
        const Strip weight = strip_load(group.weight + at, s->group - at);
        low = strip_clamp(weight, -most, low), high = strip_clamp(weight, high, most);
    }
    for (int lane = 0; lane < STRIP_WIDTH; lane++) {
        group.low = smaller(low[lane], group.low);
        group.high = larger(high[lane], group.high);
    }
    return group;
}

INLINE void search_row(const RangeSearch *s, int64_t row) {
    const int64_t groups = s->columns / s->group;
    for (int64_t g = 0; g < groups; g++) {
        const Group group = group_at(s, row, g * s->group);
        Trials trials;
        try_parts(s, &group, &trials);
        Range best[MOST_KEPT];
        for (int64_t i = 0; i < s->kept; i++) best[i] = (Range){trials.scale[0], trials.zero[0], __builtin_inff()};
        if (s->parts > 1) {
            consider(s, &group, &trials, s->parts, best);
            try_neighbours(s, &best[0], &trials);
            consider(s, &group, &trials, s->neighbours, best);
        }
        for (int64_t i = 0; i < s->kept; i++) {
            s->scales[(row * groups + g) * s->kept + i] = best[i].scale;
            s->zeros[(row * groups + g) * s->kept + i] = (uint8_t)best[i].zero;
        }
    }
}

INLINE void encode_row(const GroupEncoding *e, int64_t row) {
    const int64_t groups = e->columns / e->group;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = row * e->columns + g * e->group;
        const float zero = e->zeros[row * groups + g];
        const Strip scale = strip_of(e->scales[row * groups + g]), low = strip_of(-zero), high = strip_of(e->max_code - zero);
        for (int64_t at = 0; at < e->group; at += STRIP_WIDTH) {
            const int64_t left = e->group - at;
            const size_t count = (size_t)(left < STRIP_WIDTH ? left : STRIP_WIDTH);
            Strip steps = strip_clamp(strip_load(e->weight + first + at, left) / scale, low, high);
            steps = (steps + strip_of(ROUNDING)) - strip_of(ROUNDING);
            const CodeStrip codes = __builtin_convertvector(steps + strip_of(zero), CodeStrip);
            const Strip values = steps * scale;
            if (e->codes) memcpy(e->codes + first + at, &codes, count);
            if (e->values) memcpy(e->values + first + at, &values, count * sizeof(float));
        }
    }
}

#endif
