#include "linear_tiles.h"

#if ON_X86

#include <immintrin.h>

#define TARGET FOR_AVX512
#define PER_VECTOR 16
#define VECTORS 4

typedef __m512 Floats, Table;
typedef __m512i Words;

INLINE TARGET Floats floats_zero(void) { return _mm512_setzero_ps(); }
INLINE TARGET Floats floats_all(float x) { return _mm512_set1_ps(x); }
INLINE TARGET Floats floats_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE TARGET void floats_store(float *to, Floats x) { _mm512_storeu_ps(to, x); }
INLINE TARGET Floats floats_add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE TARGET Floats floats_mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE TARGET Floats floats_fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE TARGET Floats floats_of(Words x) { return _mm512_cvtepi32_ps(x); }
INLINE TARGET Floats floats_from_bits(Words x) { return _mm512_castsi512_ps(x); }

INLINE TARGET Words words_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE TARGET Words words_load(const uint32_t *from) { return _mm512_loadu_si512(from); }
INLINE TARGET Words words_sub(Words a, Words b) { return _mm512_sub_epi32(a, b); }
INLINE TARGET Words words_mul(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
INLINE TARGET Words words_code(Words word, int shift, int bits) {
    return _mm512_and_si512(_mm512_srli_epi32(word, (unsigned)shift), words_all((1 << bits) - 1));
}
INLINE TARGET Words words_high_half(Words word, int shift) {
    return shift ? _mm512_and_si512(word, words_all((int32_t)0xffff0000)) : _mm512_slli_epi32(word, 16);
}
INLINE TARGET Words words_bytes(Words word, int shift, int bits) {
    if (bits == 8) return word;
    return _mm512_and_si512(_mm512_srli_epi16(word, (unsigned)shift), _mm512_set1_epi8((char)((1 << bits) - 1)));
}
INLINE TARGET Words words_dot(Words sum, Words codes, int32_t levels) {
    return _mm512_dpbusd_epi32(sum, codes, words_all(levels));
}

/* Lookups see only the low bits of an index, and tables of fewer codes repeat themselves: no mask is needed. */
INLINE TARGET Table table_load(const float *table) { return _mm512_loadu_ps(table); }
INLINE TARGET Floats table_look_up(Table table, Words word, int shift) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(word, (unsigned)shift), table);
}

INLINE TARGET Words load_bytes(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
INLINE TARGET Floats load_scale(const LinearWeight *weight, int64_t index) {
    if (weight->scale_type == FLOAT32) return floats_load((const float *)weight->scales + index);
    const __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)weight->scales + index));
    if (weight->scale_type == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

#include "linear_runs.h"

/* ---- bfloat16 activations: pairs of inputs ---- */

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

/* ---- the table ---- */

RUN_KERNELS_6(float32, 2) RUN_KERNELS_6(float32, 4) RUN_KERNELS_6(float32, 8)
RUN_KERNELS_6(float32, 16) RUN_KERNELS_6(float32, 32)
RUN_KERNELS_6(bfloat16, 2) RUN_KERNELS_6(bfloat16, 4) RUN_KERNELS_6(bfloat16, 8) RUN_KERNELS_6(bfloat16, 16)
RUN_KERNELS_6(levels, 2) RUN_KERNELS_6(levels, 4) RUN_KERNELS_6(levels, 8)
DECODE_KERNEL(float32, 2) DECODE_KERNEL(float32, 4) DECODE_KERNEL(float32, 8) DECODE_KERNEL(float32, 16)
DECODE_KERNEL(bfloat16, 2) DECODE_KERNEL(bfloat16, 4) DECODE_KERNEL(bfloat16, 8)

const KernelSet avx512_kernels = {
    .float32 = {6, 32,
                {RUN_NAMES_6(float32, 2), RUN_NAMES_6(float32, 4), RUN_NAMES_6(float32, 8), RUN_NAMES_6(float32, 16),
                 RUN_NAMES_6(float32, 32)},
                {float32_2, float32_4, float32_8, float32_16, NULL}},
    .bfloat16 = {6, 16,
                 {RUN_NAMES_6(bfloat16, 2), RUN_NAMES_6(bfloat16, 4), RUN_NAMES_6(bfloat16, 8),
                  RUN_NAMES_6(bfloat16, 16)},
                 {bfloat16_2, bfloat16_4, bfloat16_8, NULL, NULL}},
    .levels = {6, 0, {RUN_NAMES_6(levels, 2), RUN_NAMES_6(levels, 4), RUN_NAMES_6(levels, 8)}, {NULL}},
};

#endif
