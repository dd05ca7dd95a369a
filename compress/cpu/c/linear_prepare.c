#include "linear_call.h"

#include <float.h>
#include <math.h>

static const int LAST_LEVEL = 127;

int64_t run_of(int64_t group) {
    int64_t run = group < LONGEST_RUN ? group : LONGEST_RUN;
    while (group % run) run -= INPUT_MULTIPLE;
    return run;
}

/* Inputs [start, start + INPUT_MULTIPLE) as float32. */
INLINE void load_activations(const LinearCall *call, int64_t row, int64_t start, float *values) {
    const int64_t at = row * call->x_stride + start;
    if (call->type == FLOAT32) {
        memcpy(values, (const float *)call->x + at, INPUT_MULTIPLE * sizeof *values);
        return;
    }
    const uint16_t *halves = (const uint16_t *)call->x + at;
    for (int i = 0; i < INPUT_MULTIPLE; i++) values[i] = float_of_bfloat16(halves[i]);
}

/* Of `run` inputs, in an order that has no part in which row it is. */
INLINE float sum_run(const LinearCall *call, int64_t row, int64_t start) {
    float values[INPUT_MULTIPLE], sums[INPUT_MULTIPLE] = {0}, sum = 0;
    for (int64_t k = 0; k < call->prepared.run; k += INPUT_MULTIPLE) {
        load_activations(call, row, start + k, values);
        for (int i = 0; i < INPUT_MULTIPLE; i++) sums[i] += values[i];
    }
    for (int i = 0; i < INPUT_MULTIPLE; i++) sum += sums[i];
    return sum;
}

/* As bits, so that NaN is larger than any number and is not lost. */
INLINE float largest_magnitude(const LinearCall *call, int64_t row, int64_t start, int64_t count) {
    float values[INPUT_MULTIPLE];
    int32_t largest[INPUT_MULTIPLE] = {0}, found = 0;
    for (int64_t k = 0; k < count; k += INPUT_MULTIPLE) {
        load_activations(call, row, start + k, values);
        for (int i = 0; i < INPUT_MULTIPLE; i++) {
            const int32_t bits = (int32_t)(bits_of_float(values[i]) & 0x7fffffff);
            largest[i] = bits > largest[i] ? bits : largest[i];
        }
    }
    for (int i = 0; i < INPUT_MULTIPLE; i++) found = largest[i] > found ? largest[i] : found;
    return float_of_bits((uint32_t)found);
}

/* Rounded half to even: adding 1.5 * 2^23 leaves no bits behind the point. */
INLINE int32_t round_level(float value) { return (int32_t)(bits_of_float(value + 12582912.0f) - 0x4b400000u); }

INLINE void order_levels(const int32_t *rounded, int bits, int8_t *levels) {
    const int per_word = 32 / bits;
#pragma GCC unroll 32
    for (int i = 0; i < INPUT_MULTIPLE; i++)
        levels[i] = (int8_t)rounded[i / per_word * per_word + level_input(i % per_word, bits)];
}

/* Inputs of one run as levels of a scale, in the order that codes lie in; returns their sum. A scale that is not finite
 * makes the row NaN by itself, so its levels do not matter; nor do those of scale 0. */
INLINE int32_t quantize_run(const LinearCall *call, int64_t row, int64_t start, float scale, int8_t *levels) {
    const bool usable = scale > 0;
    float values[INPUT_MULTIPLE];
    int32_t rounded[INPUT_MULTIPLE] = {0}, sums[INPUT_MULTIPLE] = {0}, sum = 0;
    for (int64_t k = 0; k < call->prepared.run; k += INPUT_MULTIPLE) {
        load_activations(call, row, start + k, values);
        if (usable)
            for (int i = 0; i < INPUT_MULTIPLE; i++) rounded[i] = round_level(values[i] / scale);
        for (int i = 0; i < INPUT_MULTIPLE; i++) sums[i] += rounded[i];
        switch (call->weight->bits) {
        case 2: order_levels(rounded, 2, levels + k); break;
        case 4: order_levels(rounded, 4, levels + k); break;
        default: order_levels(rounded, 8, levels + k);
        }
    }
    for (int i = 0; i < INPUT_MULTIPLE; i++) sum += sums[i];
    return sum;
}

/* NaN for a row that is not finite; comparisons with it are false. */
INLINE float level_scale(const LinearCall *call, int64_t row, int64_t start, int64_t count) {
    const float scale = largest_magnitude(call, row, start, count) / (float)LAST_LEVEL;
    return scale <= FLT_MAX ? scale : NAN;
}

INLINE void prepare_levels(const LinearCall *call, int64_t row) {
    const Prepared *prepared = &call->prepared;
    const int64_t inputs = call->weight->in_features;
    const float whole = call->activations == ACTIVATIONS_INT8_ROW ? level_scale(call, row, 0, inputs) : 0;
    for (int64_t run = 0; run < prepared->num_runs; run++) {
        const int64_t start = run * prepared->run, at = row * prepared->num_runs + run;
        const float scale =
            call->activations == ACTIVATIONS_INT8_ROW ? whole : level_scale(call, row, start, prepared->run);
        call->sums[at] = scale;
        call->level_sums[at] = quantize_run(call, row, start, scale, (int8_t *)call->converted + row * inputs + start);
    }
}

INLINE void prepare_row(const LinearCall *call, int64_t row) {
    const int64_t inputs = call->weight->in_features, runs = call->prepared.num_runs;
    if (call->activations != ACTIVATIONS_FLOAT) {
        prepare_levels(call, row);
        return;
    }
    if (call->converted != NULL)
        for (int64_t k = 0; k < inputs; k += INPUT_MULTIPLE)
            load_activations(call, row, k, (float *)call->converted + row * inputs + k);
    if (call->sums != NULL)
        for (int64_t run = 0; run < runs; run++) call->sums[row * runs + run] = sum_run(call, row, run * call->prepared.run);
}

/* In plain C: the compiler makes of it what each instruction set has. */
static void prepare_scalar(const LinearCall *call, int64_t row) { prepare_row(call, row); }
#if ON_X86
FOR_AVX2 static void prepare_avx2(const LinearCall *call, int64_t row) { prepare_row(call, row); }
FOR_AVX512 static void prepare_avx512(const LinearCall *call, int64_t row) { prepare_row(call, row); }
#endif

const PrepareRow prepare_by_set[NUM_INSTRUCTION_SETS] = BY_SET(prepare);
