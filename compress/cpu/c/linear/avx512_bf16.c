/* bfloat16 activations, multiplied in pairs of inputs as they are. */
#include "common/dispatch.h"

#if ON_X86

#define TARGET FOR_AVX512_BF16
#include "linear/avx512.h"
#include "linear/kernel.inc"

INLINE TARGET Words pair_values(const void *x) { return words_all(load_word(x)); }

INLINE TARGET Words pair_add(Words sum, Words weights, Words values, int bits) {
    (void)bits;
    return (Words)_mm512_dpbf16_ps((Floats)sum, (__m512bh)weights, (__m512bh)values);
}

static const Product pair_product = {2, sizeof(uint16_t), pair_weights, pair_values, pair_add};

INLINE TARGET void multiply_pairs(const Prepared *input, const Strip *strip, int bits, int rows,
                                  Words (*sums)[VECTORS]) {
    multiply_words(input, strip, pair_product, bits, rows, sums);
}

INLINE TARGET void run_pairs(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_place(weight, input, place, multiply_pairs, add_floats, bits);
}

INLINE TARGET void decode_pairs(const uint32_t *words, const Prepared *input, uint32_t *decoded, int bits) {
    decode_words(words, input, pair_product, decoded, bits, input->run);
}

static const Product e4m3_pair_product = {2, sizeof(uint16_t), e4m3_pairs, pair_values, pair_add};

INLINE TARGET void multiply_e4m3_pairs(const Prepared *input, const Strip *strip, int bits, int rows,
                                       Words (*sums)[VECTORS]) {
    multiply_words(input, strip, e4m3_pair_product, bits, rows, sums);
}

INLINE TARGET void run_e4m3_pairs(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_place(weight, input, place, multiply_e4m3_pairs, add_floats, bits);
}

INLINE TARGET void decode_e4m3_pairs(const uint32_t *words, const Prepared *input, uint32_t *decoded, int bits) {
    decode_words(words, input, e4m3_pair_product, decoded, bits, input->run);
}

RUN_KERNEL(pairs, 2) RUN_KERNEL(pairs, 4) RUN_KERNEL(pairs, 8) RUN_KERNEL(pairs, 16) RUN_KERNEL(e4m3_pairs, 8)
DECODE_KERNEL(pairs, 2) DECODE_KERNEL(pairs, 4) DECODE_KERNEL(pairs, 8) DECODE_KERNEL(e4m3_pairs, 8)

const KernelKind avx512_bfloat16 = {.most_rows = MOST_ROWS,
                                    .undecoded_blocks = 2,
                                    .decoded_bits = 16,
                                    .run = {run_pairs_2, run_pairs_4, run_pairs_8, run_pairs_16, [E4M3_INDEX] = run_e4m3_pairs_8},
                                    .decode = {decode_pairs_2, decode_pairs_4, decode_pairs_8, [E4M3_INDEX] = decode_e4m3_pairs_8}};

#endif
