/* bfloat16 activations, multiplied in pairs of inputs as they are. */
#include "dispatch.h"

#if ON_X86

#define TARGET FOR_AVX512_BF16
#include "linear_avx512.h"

/* Inputs 2 j and 2 j + 1 of every word. */
INLINE TARGET Words pair(Words word, int j, int bits, Words table) {
    if (bits == 16) return word;
    if (bits == 8) { /* exact in bfloat16: the upper halves say it all */
        const Words even = (Words)number(word, 2 * j, 8, floats_zero());
        const Words odd = (Words)number(word, 2 * j + 1, 8, floats_zero());
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
    }
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(word, (unsigned)(bits * j)), table);
}

INLINE TARGET void run_bfloat16(const LinearWeight *weight, const Prepared *input, const Strip *strip, int bits,
                                int rows) {
    const uint16_t *x = (const uint16_t *)input->x + strip->row * input->stride + strip->run * input->run;
    const Words table = _mm512_loadu_si512(input->pairs);
    const uint32_t *words = strip->words;
    Floats partial[MOST_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) partial[r][v] = floats_zero();
    for (int64_t k = 0; k < input->run; k += 32 / bits, words += TILE) {
        Words word[VECTORS];
        load_words(words, word);
#pragma GCC unroll 8
        for (int j = 0; j < 16 / bits; j++) {
            __m512bh weights[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) weights[v] = (__m512bh)pair(word[v], j, bits, table);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512bh values = (__m512bh)words_all(load_word(x + r * input->stride + k + 2 * j));
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    partial[r][v] = _mm512_dpbf16_ps(partial[r][v], weights[v], values);
            }
        }
    }
    Floats found[MOST_ROWS][VECTORS]; /* in memory; the sums in flight stay in registers */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) found[r][v] = partial[r][v];
    add_run(weight, input, strip, (const Floats(*)[VECTORS])found);
}

INLINE TARGET void decode_bfloat16(const uint32_t *words, const Prepared *input, int64_t run, uint32_t *decoded,
                                   int bits) {
    const Words table = _mm512_loadu_si512(input->pairs);
    for (int64_t k = 0; k < run; k += 32 / bits, words += TILE) {
        Words word[VECTORS];
        load_words(words, word);
#pragma GCC unroll 8
        for (int j = 0; j < 16 / bits; j++, decoded += TILE)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) _mm512_storeu_si512(decoded + v * PER_VECTOR, pair(word[v], j, bits, table));
    }
}

RUN_KERNELS_6(bfloat16, 2) RUN_KERNELS_6(bfloat16, 4) RUN_KERNELS_6(bfloat16, 8) RUN_KERNELS_6(bfloat16, 16)
DECODE_KERNEL(bfloat16, 2) DECODE_KERNEL(bfloat16, 4) DECODE_KERNEL(bfloat16, 8)

const KernelKind avx512_bfloat16 = {6, 16,
                                    {RUN_NAMES_6(bfloat16, 2), RUN_NAMES_6(bfloat16, 4), RUN_NAMES_6(bfloat16, 8),
                                     RUN_NAMES_6(bfloat16, 16)},
                                    {bfloat16_2, bfloat16_4, bfloat16_8, NULL, NULL}};

#endif
