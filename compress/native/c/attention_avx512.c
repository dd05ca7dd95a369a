/* One part with products of bfloat16 pairs: 16-bit keys and values as they are, codes through a table. */
#include "attention_part.h"

#if ON_X86
#include <immintrin.h>

#define INLINE_AVX512 FOR_AVX512 static inline __attribute__((always_inline))

enum { AHEAD = 1 }; /* strips that are fetched before they are needed */

/* Weights of the part, rounded to bfloat16: neighbours of tokens are pairs. */
typedef struct {
    uint16_t weight[TILE][PART] __attribute__((aligned(64)));
} Weights;

INLINE_AVX512 __m512bh pairs(__m512i words) { return (__m512bh)words; }

INLINE_AVX512 __m512bh pair_everywhere(const uint16_t *pair) {
    int32_t word;
    memcpy(&word, pair, sizeof word);
    return pairs(_mm512_set1_epi32(word));
}

/* What a nibble stands for, as bfloat16, twice over: the upper bits of an index do not matter then. All are exact. */
INLINE_AVX512 __m512i code_table(int64_t bits, int64_t plane) {
    uint16_t table[32];
    for (int i = 0; i < 32; i++) {
        const float code = (float)(i & 15);
        table[i] = bfloat16_of(bits == 4 ? code - 8.0f : plane ? (code - 8.0f) * 16.0f : code);
    }
    return _mm512_loadu_si512(table);
}

/* Members 2 * step and 2 * step + 1 of sixteen words of codes. */
INLINE_AVX512 __m512bh decoded(__m512i words, __m512i table, int step) {
    return pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(words, (unsigned)(4 * step)), table));
}

INLINE_AVX512 void fetch(const uint32_t *words) { _mm_prefetch((const char *)words, _MM_HINT_T0); }

/* Products of each row's query with the sixteen tokens of a strip; `next` is fetched meanwhile. */
INLINE_AVX512 void multiply_exact_keys(const Part *part, const Strip *strip, const Strip *next, Lanes *products, const int width) {
    const KvPages *pages = part->attention->pages;
    const int64_t step = pages->block_size;
    const uint32_t *words = strip->keys, *ahead = next->keys, *values = strip->values;
    __m512 even[TILE], odd[TILE];
    for (int row = 0; row < width; row++) even[row] = odd[row] = _mm512_setzero_ps();
    for (int64_t d = 0; d < pages->head_dim; d += 4, words += 2 * step, ahead += 2 * step, values += 2 * LANES) {
        const __m512bh first = pairs(_mm512_loadu_si512(words)), second = pairs(_mm512_loadu_si512(words + step));
        fetch(ahead);
        fetch(ahead + step);
        fetch(values);
        fetch(values + LANES);
        for (int row = 0; row < width; row++) {
            even[row] = _mm512_dpbf16_ps(even[row], first, pair_everywhere(part->query[row] + d));
            odd[row] = _mm512_dpbf16_ps(odd[row], second, pair_everywhere(part->query[row] + d + 2));
        }
    }
    for (int row = 0; row < width; row++) products[row] = (Lanes)_mm512_add_ps(even[row], odd[row]);
}

INLINE_AVX512 void multiply_coded_keys(const Part *part, const Strip *strip, const Strip *next, Lanes *products, const int width) {
    const KvPages *pages = part->attention->pages;
    const int64_t step = pages->block_size, bits = pages->key_bits;
    const uint32_t *words = strip->keys, *ahead = next->keys, *values = strip->values;
    __m512 even[TILE], odd[TILE];
    for (int row = 0; row < width; row++) even[row] = odd[row] = _mm512_setzero_ps();
    for (int64_t plane = 0; plane < bits / 4; plane++) {
        const __m512i table = code_table(bits, plane);
        for (int64_t d = 0; d < pages->head_dim; d += 8, words += step, ahead += step, values += LANES) {
            const __m512i coded = _mm512_loadu_si512(words);
            const __m512bh a = decoded(coded, table, 0), b = decoded(coded, table, 1);
            const __m512bh c = decoded(coded, table, 2), e = decoded(coded, table, 3);
            fetch(ahead);
            fetch(values);
            for (int row = 0; row < width; row++) {
                const uint16_t *query = part->query[row] + d;
                even[row] = _mm512_dpbf16_ps(even[row], a, pair_everywhere(query));
                odd[row] = _mm512_dpbf16_ps(odd[row], b, pair_everywhere(query + 2));
                even[row] = _mm512_dpbf16_ps(even[row], c, pair_everywhere(query + 4));
                odd[row] = _mm512_dpbf16_ps(odd[row], e, pair_everywhere(query + 6));
            }
        }
    }
    for (int row = 0; row < width; row++) products[row] = (Lanes)_mm512_add_ps(even[row], odd[row]);
}

/* `columns` times sixteen dimensions from `d` of the weighted sum of values. */
INLINE_AVX512 void multiply_values(const Part *part, const Weights *weights, int64_t d, const float *middles,
                                   PartResult *result, const int width, const int columns) {
    const KvPages *pages = part->attention->pages;
    const int64_t size = pages->head_dim, bits = pages->value_bits;
    __m512 sum[TILE][8];
    for (int row = 0; row < width; row++)
        for (int column = 0; column < columns; column++) sum[row][column] = _mm512_setzero_ps();
    if (bits == 16) {
        for (int64_t i = 0; i < part->num_strips; i++) {
            const uint32_t *words = part->strips[i].values + d;
            for (int token = 0; token < STRIP; token += 2, words += size) {
                __m512bh value[8];
                for (int column = 0; column < columns; column++) value[column] = pairs(_mm512_loadu_si512(words + column * LANES));
                for (int row = 0; row < width; row++) {
                    const __m512bh weight = pair_everywhere(weights->weight[row] + i * STRIP + token);
                    for (int column = 0; column < columns; column++)
                        sum[row][column] = _mm512_dpbf16_ps(sum[row][column], value[column], weight);
                }
            }
        }
    } else {
        for (int64_t plane = 0; plane < bits / 4; plane++) {
            const __m512i table = code_table(bits, plane);
            for (int64_t i = 0; i < part->num_strips; i++) {
                const uint32_t *words = part->strips[i].values + plane * pages->block_size / 8 * size + d;
                for (int token = 0; token < STRIP; token += 8, words += size)
                    for (int column = 0; column < columns; column++) {
                        const __m512i coded = _mm512_loadu_si512(words + column * LANES);
#pragma GCC unroll 4
                        for (int step = 0; step < 4; step++) {
                            const __m512bh value = decoded(coded, table, step);
                            for (int row = 0; row < width; row++)
                                sum[row][column] = _mm512_dpbf16_ps(
                                    sum[row][column], value, pair_everywhere(weights->weight[row] + i * STRIP + token + 2 * step));
                        }
                    }
            }
        }
    }
    for (int row = 0; row < width; row++)
        for (int column = 0; column < columns; column++)
            lanes_store(result->values[row] + d + column * LANES, (Lanes)sum[row][column] + lanes_of(middles[row]));
}

INLINE_AVX512 void attend(const Part *part, PartResult *result, const int width, const int columns) {
    const KvPages *pages = part->attention->pages;
    const int64_t size = pages->head_dim, count = part->num_strips;
    Lanes scores[TILE][STRIPS], products[TILE];
    Grid values[STRIPS];
    float middles[TILE];
    Weights weights;
    for (int64_t i = 0; i < count; i++) {
        const Strip *strip = &part->strips[i], *next = &part->strips[i + AHEAD < count ? i + AHEAD : i];
        const Grid keys = load_grid(strip->key_scales, pages->block_size, pages->key_bits);
        values[i] = load_grid(strip->value_scales, pages->block_size, pages->value_bits);
        if (pages->key_bits == 16)
            multiply_exact_keys(part, strip, next, products, width);
        else
            multiply_coded_keys(part, strip, next, products, width);
        for (int row = 0; row < width; row++) scores[row][i] = to_scores(part, row, strip, products[row], keys);
    }
    for (int row = 0; row < width; row++) {
        middles[row] = to_weights(part, row, scores[row], values, result);
        for (int64_t i = 0; i < count; i++) {
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)scores[row][i]);
            _mm256_storeu_si256((__m256i *)(weights.weight[row] + i * STRIP), rounded);
        }
    }
    int64_t d = 0;
    for (; d + columns * LANES <= size; d += columns * LANES) multiply_values(part, &weights, d, middles, result, width, columns);
    for (; d < size; d += 2 * LANES) multiply_values(part, &weights, d, middles, result, width, 2);
}

FOR_AVX512 void attend_part_avx512(const Part *part, PartResult *result) {
    switch (part->width) {
        case 1: attend(part, result, 1, 8); break;
        case 2: attend(part, result, 2, 8); break;
        case 4: attend(part, result, 4, 4); break;
        default: attend(part, result, TILE, 2); break;
    }
}
#endif
