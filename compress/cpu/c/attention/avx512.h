/* One part with vectors of AVX-512: 16-bit keys and values as they are, codes through a table. Members of words are taken
 * in pairs, neighbours of what is summed over. Where a strip is read, the same place of the next part's is fetched. A file that
 * includes this begins with the pragma of its target (see CONTRIBUTING.md) and defines
 *     TARGET                                the attribute of its functions
 *     Factor                                what pairs are multiplied by, in memory
 *     Pairs, Table                          sixteen pairs; the sixteen numbers that codes stand for
 *     table_of(codes), store_factors(to, lanes)
 *     numbers(words), wide(words, words)    pairs of sixteen words of bfloat16 numbers, or of twice sixteen float32 ones
 *     decoded(words, table, step)           members 2 * step and 2 * step + 1 of sixteen words of codes
 *     add_products(sum, pairs, factors)     sum + both products of every pair with two factors
 */
#include "attention/part.h"

enum { MOST_ABREAST = 4 }; /* strips whose keys are multiplied together: reading several streams hides more latency */

typedef struct {
    Factor of[TILE][LONGEST_HEAD] __attribute__((aligned(64)));
} Queries;

typedef struct {
    Factor of[TILE][PART] __attribute__((aligned(64)));
} Weights;

/* Values of nibbles. */
INLINE TARGET Table code_table(int64_t bits, int64_t plane) {
    const Lanes codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (bits == 8 && plane == 0) return table_of(codes);
    return table_of((codes - lanes_of(8.0f)) * lanes_of(bits == 8 ? 16.0f : 1.0f));
}

/* As load_grid: this conversion flushes no small numbers. */
INLINE TARGET Grid load_scales(const uint16_t *scales, int64_t block_size, int64_t bits) {
    if (bits >= 16) return (Grid){lanes_of(1.0f), lanes_of(0.0f)};
    const Lanes scale = (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
    const Lanes offset = (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + block_size)));
    return (Grid){scale, offset + scale * lanes_of(bits == 8 ? 128.0f : 8.0f)};
}

INLINE TARGET __m512i load_words(const uint32_t *words) { return _mm512_loadu_si512(words); }

/* Products of each row's query with the tokens of `abreast` strips. */
INLINE TARGET void multiply_exact_keys(const Part *part, const Queries *query, int64_t first, Lanes (*products)[STRIPS],
                                       const int width, const int abreast) {
    const int64_t size = part->attention->pages->head_dim, step = part->attention->pages->block_size;
    const int is_wide = part->attention->pages->key_bits == 32;
    const Strip *strips = &part->strips[first], *next = next_strips(part, first, abreast);
    __m512 sum[TILE][MOST_ABREAST];
    for (int row = 0; row < width; row++)
        for (int i = 0; i < abreast; i++) sum[row][i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < size; d += 2) {
        Pairs key[MOST_ABREAST];
        const int64_t at = (is_wide ? d : d / 2) * step;
        for (int i = 0; i < abreast; i++) {
            const uint32_t *words = strips[i].keys + at;
            key[i] = is_wide ? wide(load_words(words), load_words(words + step)) : numbers(load_words(words));
            if (next) fetch(next[i].keys + at);
            if (next && is_wide) fetch(next[i].keys + at + step);
        }
        for (int row = 0; row < width; row++)
            for (int i = 0; i < abreast; i++) sum[row][i] = add_products(sum[row][i], key[i], query->of[row] + d);
    }
    for (int row = 0; row < width; row++)
        for (int i = 0; i < abreast; i++) products[row][first + i] = (Lanes)sum[row][i];
}

INLINE TARGET void multiply_coded_keys(const Part *part, const Queries *query, int64_t first, Lanes (*products)[STRIPS],
                                       const int width, const int abreast) {
    const KvPages *pages = part->attention->pages;
    const int64_t size = pages->head_dim, step = pages->block_size, bits = pages->key_bits;
    const Strip *strips = &part->strips[first], *next = next_strips(part, first, abreast);
    __m512 sum[TILE][MOST_ABREAST];
    for (int row = 0; row < width; row++)
        for (int i = 0; i < abreast; i++) sum[row][i] = _mm512_setzero_ps();
    for (int64_t plane = 0; plane < bits / 4; plane++) {
        const Table table = code_table(bits, plane);
        for (int64_t d = 0; d < size; d += 8) {
            const int64_t at = (plane * size + d) / 8 * step;
            __m512i coded[MOST_ABREAST];
            for (int i = 0; i < abreast; i++) {
                coded[i] = load_words(strips[i].keys + at);
                if (next) fetch(next[i].keys + at);
            }
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; pair++) {
                Pairs key[MOST_ABREAST];
                for (int i = 0; i < abreast; i++) key[i] = decoded(coded[i], table, pair);
                for (int row = 0; row < width; row++)
                    for (int i = 0; i < abreast; i++)
                        sum[row][i] = add_products(sum[row][i], key[i], query->of[row] + d + 2 * pair);
            }
        }
    }
    for (int row = 0; row < width; row++)
        for (int i = 0; i < abreast; i++) products[row][first + i] = (Lanes)sum[row][i];
}

INLINE TARGET void multiply_keys(const Part *part, const Queries *query, int64_t first, Lanes (*products)[STRIPS],
                                 const int width, const int abreast) {
    const Strip *next = next_strips(part, first, abreast);
    for (int i = 0; next && i < abreast; i++) fetch_scales(part->attention->pages, &next[i]);
    if (part->attention->pages->key_bits >= 16)
        multiply_exact_keys(part, query, first, products, width, abreast);
    else
        multiply_coded_keys(part, query, first, products, width, abreast);
}

/* e^x for x <= 0, within 2^-22 of it and as much again for each unit of x; NaN stays, and what is minus infinity becomes it.
 * The power of two of what is left behind the point: the polynomial of degree 5 with the least relative error, 1.6e-7. */
INLINE TARGET __m512 exp_below(__m512 x) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 n = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(power, n);
    __m512 p = _mm512_set1_ps(1.32647296e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.67151299e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55073358e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40222424e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147004e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

INLINE TARGET Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

/* Scores of a row from its products, in their place; the largest is returned. */
INLINE TARGET float score_row(const Part *part, int row, Lanes *scores, const Grid *keys, int all) {
    const Lanes query_sum = lanes_of(part->query_sum[row]);
    const float softcap = part->attention->softcap;
    __m512 most = _mm512_set1_ps(UNSEEN);
    for (int64_t i = 0; i < part->num_strips; i++) {
        Lanes score = multiply_add(scores[i], keys[i].scale, keys[i].middle * query_sum);
        if (softcap != 0) score = soft_cap(score, softcap);
        if (!all) score = lanes_select(visible(part, row, &part->strips[i]), score, lanes_of(UNSEEN));
        scores[i] = score;
        most = _mm512_max_ps(most, (__m512)score);
    }
    return _mm512_reduce_max_ps(most);
}

/* Weights of what stands in the pages, the scale of values among them; adds them to the row's sum. The share of what codes
 * of values are centred on, the same for all dimensions, is returned. */
INLINE TARGET float weigh_row(const Part *part, int row, const Lanes *scores, const Grid *values, int all, Factor *weights,
                              float left, PartResult *result) {
    const Lanes largest = lanes_of(result->largest[row]);
    Lanes sum = {0}, middles = {0};
    for (int64_t i = 0; i < part->num_strips; i++) {
        const Lanes weight = (Lanes)exp_below((__m512)(scores[i] - largest));
        Lanes scaled = weight * values[i].scale, middle = multiply_add(weight, values[i].middle, middles), total = sum + weight;
        if (!all) {
            const IntLanes seen = visible(part, row, &part->strips[i]);
            scaled = lanes_select(seen, scaled, (Lanes){0});
            middle = lanes_select(seen, middle, middles);
            total = lanes_select(seen, total, sum);
        }
        middles = middle, sum = total;
        store_factors(weights + i * STRIP, scaled);
    }
    result->sum[row] = result->sum[row] * left + _mm512_reduce_add_ps((__m512)sum);
    return _mm512_reduce_add_ps((__m512)middles);
}

INLINE TARGET void add_exact_values(const Part *part, const Weights *weights, int64_t d, __m512 (*sum)[8], const int width,
                                    const int columns) {
    const int64_t size = part->attention->pages->head_dim;
    const int is_wide = part->attention->pages->value_bits == 32;
    for (int64_t i = 0; i < part->num_strips; i++) {
        const Strip *strip = &part->strips[i], *next = next_strips(part, i, 1);
        for (int token = 0; token < STRIP; token += 2) {
            const int64_t at = (is_wide ? token : token / 2) * size + d;
            Pairs value[8];
            for (int column = 0; column < columns; column++) {
                const uint32_t *from = strip->values + at + column * LANES;
                value[column] = is_wide ? wide(load_words(from), load_words(from + size)) : numbers(load_words(from));
                if (next) fetch(next->values + at + column * LANES);
                if (next && is_wide) fetch(next->values + at + column * LANES + size);
            }
            for (int row = 0; row < width; row++)
                for (int column = 0; column < columns; column++)
                    sum[row][column] = add_products(sum[row][column], value[column], weights->of[row] + i * STRIP + token);
        }
    }
}

INLINE TARGET void add_coded_values(const Part *part, const Weights *weights, int64_t d, __m512 (*sum)[8], const int width,
                                    const int columns) {
    const KvPages *pages = part->attention->pages;
    const int64_t size = pages->head_dim, bits = pages->value_bits;
    for (int64_t plane = 0; plane < bits / 4; plane++) {
        const Table table = code_table(bits, plane);
        for (int64_t i = 0; i < part->num_strips; i++) {
            const Strip *strip = &part->strips[i], *next = next_strips(part, i, 1);
            for (int token = 0; token < STRIP; token += 8) {
                const int64_t at = (plane * pages->block_size + token) / 8 * size + d;
                __m512i coded[8];
                for (int column = 0; column < columns; column++) coded[column] = load_words(strip->values + at + column * LANES);
#pragma GCC unroll 4
                for (int pair = 0; pair < 4; pair++) {
                    Pairs value[8];
                    for (int column = 0; column < columns; column++) value[column] = decoded(coded[column], table, pair);
                    for (int column = pair; next && column < columns; column += 4) fetch(next->values + at + column * LANES);
                    for (int row = 0; row < width; row++)
                        for (int column = 0; column < columns; column++)
                            sum[row][column] = add_products(sum[row][column], value[column],
                                                            weights->of[row] + i * STRIP + token + 2 * pair);
                }
            }
        }
    }
}

/* `columns` times sixteen dimensions from `d` of the weighted sum of values. */
INLINE TARGET void add_values(const Part *part, const Weights *weights, int64_t d, const float *middles, const float *left,
                              PartResult *result, const int width, const int columns) {
    const KvPages *pages = part->attention->pages;
    __m512 sum[TILE][8];
    for (int row = 0; row < width; row++)
        for (int column = 0; column < columns; column++) sum[row][column] = _mm512_setzero_ps();
    if (pages->value_bits >= 16)
        add_exact_values(part, weights, d, sum, width, columns);
    else
        add_coded_values(part, weights, d, sum, width, columns);
    for (int row = 0; row < width; row++)
        for (int column = 0; column < columns; column++) {
            float *to = result->values + row * pages->head_dim + d + column * LANES;
            lanes_store(to, lanes_load(to) * lanes_of(left[row]) + ((Lanes)sum[row][column] + lanes_of(middles[row])));
        }
}

INLINE TARGET void attend(const Part *part, PartResult *result, const int width, const int abreast, const int columns) {
    const KvPages *pages = part->attention->pages;
    const int64_t size = pages->head_dim, count = part->num_strips;
    const int all = sees_all(part);
    Lanes scores[TILE][STRIPS];
    Grid keys[STRIPS], values[STRIPS];
    float middles[TILE], left[TILE];
    Queries queries;
    Weights weights;
    for (int row = 0; row < width; row++)
        for (int64_t d = 0; d < size; d += LANES)
            store_factors(queries.of[row] + d, lanes_load(part->query[row] + d));
    int64_t strip = 0;
    for (; strip + abreast <= count; strip += abreast) multiply_keys(part, &queries, strip, scores, width, abreast);
    for (; strip < count; strip++) multiply_keys(part, &queries, strip, scores, width, 1);
    for (int64_t i = 0; i < count; i++) {
        keys[i] = load_scales(part->strips[i].key_scales, pages->block_size, pages->key_bits);
        keys[i].scale *= lanes_of(part->attention->scale), keys[i].middle *= lanes_of(part->attention->scale);
        values[i] = load_scales(part->strips[i].value_scales, pages->block_size, pages->value_bits);
    }
    for (int row = 0; row < width; row++) {
        left[row] = raise_largest(result, row, score_row(part, row, scores[row], keys, all));
        middles[row] = weigh_row(part, row, scores[row], values, all, weights.of[row], left[row], result);
    }
    int64_t d = 0;
    for (; d + columns * LANES <= size; d += columns * LANES)
        add_values(part, &weights, d, middles, left, result, width, columns);
    for (; d < size; d += 2 * LANES) add_values(part, &weights, d, middles, left, result, width, 2);
}

INLINE TARGET void attend_part(const Part *part, PartResult *result) {
    switch (part->width) {
        case 1: attend(part, result, 1, 4, 8); break;
        case 2: attend(part, result, 2, 4, 8); break;
        case 4: attend(part, result, 4, 4, 4); break;
        default: attend(part, result, TILE, 2, 2); break;
    }
}
