#include "common/dispatch.h"

#if ON_X86

#define TARGET FOR_AVX512
#define UNDECODED_BLOCKS 6
#include "linear/avx512.h"
#include "linear/kernel.inc"

/* A few rows of bfloat16 activations, with the bits of tile_add_bfloat16 (common/matrix_tiles.h): products of even inputs are
 * added up apart from those of odd ones, over the inputs of one instruction. */

enum { ORDERED_INPUTS = 32 };

typedef Words (*Weights)(Words word, int input, int bits, Table table);

INLINE TARGET Words ordered_weights(Words word, int input, int bits, Table table) {
    if (bits == 8) return (Words)floats_centred(word, code_shift(input, 8));
    const Words pair = pair_weights(word, input / 2, bits, table);
    return input % 2 ? pair & 0xffff0000u : pair << 16;
}

/* Products of words with a pair of each row for each of their pairs. */
INLINE TARGET void add_apart(const uint16_t *x, int64_t stride, const Words *word, Table table, Weights weights, int bits,
                             int rows, int count, Floats (*even)[VECTORS], Floats (*odd)[VECTORS]) {
#pragma GCC unroll 8
    for (int step = 0; step < 16 / bits; step++) {
        Floats first_weights[VECTORS], second_weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < count; v++) {
            first_weights[v] = (Floats)weights(word[v], 2 * step, bits, table);
            second_weights[v] = (Floats)weights(word[v], 2 * step + 1, bits, table);
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            const Words values = words_all((uint32_t)load_word(x + r * stride + 2 * step));
            const Floats first = (Floats)(values << 16), second = (Floats)(values & 0xffff0000u);
#pragma GCC unroll 4
            for (int v = 0; v < count; v++) {
                even[r][v] = floats_fma(first_weights[v], first, even[r][v]);
                odd[r][v] = floats_fma(second_weights[v], second, odd[r][v]);
            }
        }
    }
}

/* `count` vectors of features. */
INLINE TARGET void multiply_ordered(const Prepared *input, const Strip *strip, Weights weights, int bits, int rows, int first,
                                    int count, Words (*sums)[VECTORS]) {
    const uint16_t *x = (const uint16_t *)input->x + strip->row * input->stride + strip->run * input->run;
    const Table table = table_load(input->table.floats);
    const uint32_t *words = strip->words + first * PER_VECTOR;
    for (int64_t k = 0; k < input->run; k += ORDERED_INPUTS) {
        Floats even[FEW_ROWS][VECTORS] = {0}, odd[FEW_ROWS][VECTORS] = {0};
        for (int i = 0; i < bits; i++, words += TILE) {
            Words word[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < count; v++) {
                word[v] = words_load(words + v * PER_VECTOR);
                __builtin_prefetch((const char *)(words + v * PER_VECTOR) + AHEAD);
            }
            add_apart(x + k + i * (32 / bits), input->stride, word, table, weights, bits, rows, count, even, odd);
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < count; v++)
                sums[r][first + v] = (Words)((Floats)sums[r][first + v] + (even[r][v] + odd[r][v]));
    }
}

/* Sums of three rows by all vectors would not stay in registers. */
INLINE TARGET void multiply_in_strips(const Prepared *input, const Strip *strip, Weights weights, int bits, int rows,
                                      Words (*sums)[VECTORS]) {
    const int count = rows < FEW_ROWS ? VECTORS : VECTORS / 2;
#pragma GCC unroll 2
    for (int first = 0; first < VECTORS; first += count)
        multiply_ordered(input, strip, weights, bits, rows, first, count, sums);
}

INLINE TARGET void multiply_tile_order(const Prepared *input, const Strip *strip, int bits, int rows,
                                       Words (*sums)[VECTORS]) {
    multiply_in_strips(input, strip, ordered_weights, bits, rows, sums);
}
INLINE TARGET void multiply_e4m3_tile_order(const Prepared *input, const Strip *strip, int bits, int rows,
                                            Words (*sums)[VECTORS]) {
    multiply_in_strips(input, strip, e4m3_weights, bits, rows, sums);
}

INLINE TARGET void run_few(const LinearWeight *weight, const Prepared *input, const Place *place, Multiply multiply, int bits) {
    switch (place->rows) {
        case 1: run_strips(weight, input, place, multiply, add_floats, bits, 1); break;
        case 2: run_strips(weight, input, place, multiply, add_floats, bits, 2); break;
        case 3: run_strips(weight, input, place, multiply, add_floats, bits, 3); break;
    }
}
INLINE TARGET void run_tile_order(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_few(weight, input, place, multiply_tile_order, bits);
}
INLINE TARGET void run_e4m3_tile_order(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_few(weight, input, place, multiply_e4m3_tile_order, bits);
}

RUN_KERNEL(tile_order, 2) RUN_KERNEL(tile_order, 4) RUN_KERNEL(tile_order, 8) RUN_KERNEL(tile_order, 16)
RUN_KERNEL(e4m3_tile_order, 8)

const KernelKind avx512_tile_order = {.most_rows = FEW_ROWS,
                                      .decoded_bits = 16,
                                      .run = {run_tile_order_2, run_tile_order_4, run_tile_order_8, run_tile_order_16,
                                              [E4M3_INDEX] = run_e4m3_tile_order_8}};
const KernelKind avx512_float32 = FLOAT32_KERNELS(NULL);
const KernelKind avx512_q8 = Q8_KERNELS;

#endif
