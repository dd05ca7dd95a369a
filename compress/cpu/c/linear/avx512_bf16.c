/* bfloat16 activations, multiplied in pairs of inputs as they are. */
#include "common/dispatch.h"

#if ON_X86

#define TARGET FOR_AVX512_BF16
#include "linear/avx512.h"
#include "linear/kernel.inc"

INLINE TARGET Words pair_weights(Words word, int step, int bits, Table table) {
    if (bits == 16) return word;
    if (bits == 8) { /* exact in bfloat16: the upper halves say it all */
        const Floats even = floats_centred(word, code_shift(2 * step, 8)), odd = floats_centred(word, code_shift(2 * step + 1, 8));
        return (Words)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)((Words)even >> 16), (__m512i)odd);
    }
    return (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)word, (unsigned)(bits * step)), (__m512i)table);
}

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
    decode_words(words, input, pair_product, decoded, bits);
}

RUN_KERNEL(pairs, 2) RUN_KERNEL(pairs, 4) RUN_KERNEL(pairs, 8) RUN_KERNEL(pairs, 16)
DECODE_KERNEL(pairs, 2) DECODE_KERNEL(pairs, 4) DECODE_KERNEL(pairs, 8)

const KernelKind avx512_bfloat16 = {MOST_ROWS,
                                    2,
                                    16,
                                    {run_pairs_2, run_pairs_4, run_pairs_8, run_pairs_16},
                                    {decode_pairs_2, decode_pairs_4, decode_pairs_8}};

#endif
