/* Products of float32 activations with codes of which two of every four are kept (width SPARSE of linear.h). A sum takes its
 * inputs in their order and leaves out only zeros, so it is that of a decoded run. */
#include "linear_runs.h"
#include "linear_scales.h"

INLINE TARGET void multiply_sparse(const Prepared *input, const Strip *strip, int bits, int rows,
                                   Words (*sums)[VECTORS]) {
    (void)bits;
    const float *x = (const float *)input->x + strip->row * input->stride + strip->run * input->run;
    const Table table = table_load(input->table.floats);
    const uint32_t *words = strip->words;
    for (int64_t k = 0; k < input->run; k += 16) {
        const int half = k / 16 % 2;
        Words codes[VECTORS], places[VECTORS];
        load_words(words + half * TILE, codes);
        load_words(words + 2 * TILE, places);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) places[v] = half ? places[v] >> 16 : places[v];
        words += half * 3 * TILE;
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const Floats weights = table_look_up(table, codes[v], 4 * j);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const Floats quad = floats_quad(x + r * input->stride + k + j / 2 * 4);
                    sums[r][v] = (Words)floats_fma(weights, floats_pick(quad, places[v], 2 * j), (Floats)sums[r][v]);
                }
            }
    }
}

INLINE TARGET void run_sparse(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_place(weight, input, place, multiply_sparse, add_floats, bits);
}

INLINE TARGET void decode_sparse(const uint32_t *words, const Prepared *input, uint32_t *decoded, int bits) {
    (void)bits;
    const Table table = table_load(input->table.floats);
    for (int64_t k = 0; k < input->run; k += 32, words += 3 * TILE, decoded += 32 * TILE)
        for (int v = 0; v < TILE / PER_VECTOR; v++) {
            const Words places = words_load(words + 2 * TILE + v * PER_VECTOR);
            float *to = (float *)decoded + v * PER_VECTOR;
#pragma GCC unroll 8
            for (int quad = 0; quad < 8; quad++) {
                const Words codes = words_load(words + quad / 4 * TILE + v * PER_VECTOR);
                const Floats first = table_look_up(table, codes, quad % 4 * 8);
                const Floats second = table_look_up(table, codes, quad % 4 * 8 + 4);
#pragma GCC unroll 4
                for (int place = 0; place < 4; place++, to += TILE)
                    floats_store(to, floats_at_place(places, quad * 4, place, first) +
                                         floats_at_place(places, quad * 4 + 2, place, second));
            }
        }
}
