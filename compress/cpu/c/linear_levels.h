/* Products with 8-bit activations, four inputs at a time, in exact integers. */
#include "linear_runs.h"
#include "linear_scales.h"

/* sums += (found - zero * sum of levels) * scale * scale of levels; the difference is exact. */
NOINLINE TARGET void add_levels(const LinearWeight *weight, const Prepared *input, const Strip *strip,
                                Words (*found)[VECTORS]) {
    Floats scale[VECTORS];
    Words zero[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const int64_t index = strip->scale + v * PER_VECTOR;
        scale[v] = load_scale(weight, index);
        zero[v] = weight->zeros == NULL ? words_all(1u << (weight->bits - 1)) : words_of_bytes(weight->zeros + index);
    }
    for (int r = 0; r < strip->rows; r++) {
        const int64_t at = (strip->row + r) * input->num_runs + strip->run;
        const Words sum = words_all((uint32_t)input->level_sums[at]);
        const Floats level_scale = floats_all(input->level_scales[at]);
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            const Floats moved = floats_of(found[r][v] - zero[v] * sum);
            floats_store(to, floats_fma(moved, scale[v] * level_scale, floats_load(to)));
        }
    }
}

/* The codes from bit bits * step of every byte on. */
INLINE TARGET Words level_weights(Words word, int step, int bits, Table table) {
    (void)table;
    return bits == 8 ? word : word >> bits * step & ((1u << bits) - 1) * 0x01010101u;
}

INLINE TARGET Words level_values(const void *x) { return words_all(load_word(x)); }

static const Product level_product = {4, sizeof(int8_t), level_weights, level_values, words_dot};

INLINE TARGET void multiply_levels(const Prepared *input, const Strip *strip, int bits, int rows,
                                   Words (*sums)[VECTORS]) {
    multiply_words(input, strip, level_product, bits, rows, sums);
}

INLINE TARGET void run_levels(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_place(weight, input, place, multiply_levels, add_levels, bits);
}
