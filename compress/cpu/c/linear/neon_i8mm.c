/* Matrix products of bytes (i8mm): one instruction multiplies eight inputs of two features by those of two rows. */
#include "common/dispatch.h"

#if ON_ARM

#define TARGET FOR_NEON_I8MM
#include "linear/neon.h"

enum { PAIRS = (MOST_ROWS + 1) / 2 };

/* In assembly: some compilers offer it only to code that never runs on a processor without it. */
INLINE TARGET Words i8mm_dot(Words sum, Words codes, Words q8, int bits) {
    (void)bits;
    __asm__("usdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(codes), "w"(q8));
    return sum;
}

/* Sums of two features, each with two rows. */
INLINE TARGET Words i8mm_add(Words sum, Words codes, Words q8) {
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(codes), "w"(q8));
    return sum;
}

static const Product i8mm_product = {4, sizeof(int8_t), q8_weights, q8_values, i8mm_dot};

/* Eight inputs of two rows. */
INLINE TARGET Words two_rows(const int8_t *first, const int8_t *second) {
    return (Words)vcombine_s8(vld1_s8(first), vld1_s8(second));
}

/* Eight inputs of features 0 and 1, and of 2 and 3, from four and the next four of each. */
INLINE TARGET void pair_features(Words first, Words second, Words pairs[2]) {
    pairs[0] = vzip1q_u32(first, second);
    pairs[1] = vzip2q_u32(first, second);
}

/* Codes of the inputs from 8 step on, of a word of each feature, or of two words where codes are bytes. */
INLINE TARGET void load_pairs(const uint32_t *words, int step, int bits, Words pairs[VECTORS][2]) {
    Words word[VECTORS], next[VECTORS];
    const Table none = {0};
    load_words(words, word);
    if (bits == 8) load_words(words + TILE, next);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
        if (bits == 8)
            pair_features(word[v], next[v], pairs[v]);
        else
            pair_features(q8_weights(word[v], 2 * step, bits, none), q8_weights(word[v], 2 * step + 1, bits, none), pairs[v]);
}

/* An odd last row is multiplied twice. */
INLINE TARGET void multiply_pairs(const Prepared *input, const Strip *strip, int bits, int rows, Words (*found)[VECTORS][2]) {
    const int inputs = bits == 8 ? 8 : 32 / bits;
    const int8_t *x = (const int8_t *)input->x + strip->row * input->stride + strip->run * input->run;
    const uint32_t *words = strip->words;
    for (int64_t k = 0; k < input->run; k += inputs, words += inputs * bits / 32 * TILE)
#pragma GCC unroll 2
        for (int step = 0; step < inputs / 8; step++) {
            Words pairs[VECTORS][2];
            load_pairs(words, step, bits, pairs);
#pragma GCC unroll 3
            for (int p = 0; p < (rows + 1) / 2; p++) {
                const int8_t *first = x + 2 * p * input->stride + k + 8 * step;
                const Words values = two_rows(first, 2 * p + 1 < rows ? first + input->stride : first);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) found[p][v][half] = i8mm_add(found[p][v][half], pairs[v][half], values);
            }
        }
}

INLINE TARGET void multiply_i8mm(const Prepared *input, const Strip *strip, int bits, int rows, Words (*sums)[VECTORS]) {
    if (rows == 1) {
        multiply_words(input, strip, i8mm_product, bits, rows, sums);
        return;
    }
    Words found[PAIRS][VECTORS][2];
#pragma GCC unroll 3
    for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) found[p][v][0] = found[p][v][1] = words_all(0);
    multiply_pairs(input, strip, bits, rows, found);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const Words *pair = found[r / 2][v];
            sums[r][v] = r % 2 ? vuzp2q_u32(pair[0], pair[1]) : vuzp1q_u32(pair[0], pair[1]);
        }
}

INLINE TARGET void run_i8mm(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_place(weight, input, place, multiply_i8mm, add_q8, bits);
}

RUN_KERNEL(i8mm, 2) RUN_KERNEL(i8mm, 4) RUN_KERNEL(i8mm, 8)

const KernelKind neon_i8mm_q8 = {.most_rows = MOST_ROWS, .run = {run_i8mm_2, run_i8mm_4, run_i8mm_8}};

#endif
