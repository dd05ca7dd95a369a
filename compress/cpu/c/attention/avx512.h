/* One part with vectors of AVX-512: 16-bit keys and values as they are, codes through a table. Members of words are taken
 * in pairs, neighbours of what is summed over. What is read is fetched half a part before: values while keys are
 * multiplied, the next part's keys while values are. A file that includes this begins with the pragma of its target
 * (see CONTRIBUTING.md) and defines
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
    float codes[16];
    for (int i = 0; i < 16; i++)
        codes[i] = bits == 4 ? (float)i - 8.0f : plane ? ((float)i - 8.0f) * 16.0f : (float)i;
    return table_of(codes);
}

/* Into the second cache: misses of the first one are few at a time. */
INLINE TARGET void fetch(const uint32_t *words) { _mm_prefetch((const char *)words, _MM_HINT_T1); }

INLINE TARGET __m512i load_words(const uint32_t *words) { return _mm512_loadu_si512(words); }

/* Products of each row's query with the tokens of `abreast` strips. */
INLINE TARGET void multiply_exact_keys(const Part *part, const Queries *query, int64_t first, Lanes (*products)[STRIPS],
                                       const int width, const int abreast) {
    const int64_t size = part->attention->pages->head_dim, step = part->attention->pages->block_size;
    const int is_wide = part->attention->pages->key_bits == 32;
    const Strip *strips = &part->strips[first];
    __m512 sum[TILE][MOST_ABREAST];
    for (int row = 0; row < width; row++)
        for (int i = 0; i < abreast; i++) sum[row][i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < size; d += 2) {
        Pairs key[MOST_ABREAST];
        for (int i = 0; i < abreast; i++) {
            const uint32_t *words = strips[i].keys + (is_wide ? d : d / 2) * step;
            const uint32_t *values = strips[i].values + (is_wide ? d : d / 2) * LANES;
            key[i] = is_wide ? wide(load_words(words), load_words(words + step)) : numbers(load_words(words));
            fetch(values);
            if (is_wide) fetch(values + LANES);
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
    const Strip *strips = &part->strips[first];
    __m512 sum[TILE][MOST_ABREAST];
    for (int row = 0; row < width; row++)
        for (int i = 0; i < abreast; i++) sum[row][i] = _mm512_setzero_ps();
    for (int64_t plane = 0; plane < bits / 4; plane++) {
        const Table table = code_table(bits, plane);
        const int64_t keys = plane * size / 8 * step, values = plane * pages->block_size / 8 * size;
        for (int64_t d = 0; d < size; d += 8) {
            __m512i coded[MOST_ABREAST];
            for (int i = 0; i < abreast; i++) {
                coded[i] = load_words(strips[i].keys + keys + d / 8 * step);
                if (plane < pages->value_bits / 4) fetch(strips[i].values + values + d / 8 * LANES);
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
    if (part->attention->pages->key_bits >= 16)
        multiply_exact_keys(part, query, first, products, width, abreast);
    else
        multiply_coded_keys(part, query, first, products, width, abreast);
}

/* e^x for x <= 0, within 2 units in the last place; NaN stays, and what is minus infinity becomes it. */
INLINE TARGET __m512 exp_below(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x); /* ln 2 in two pieces */
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665796e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000000e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* Scores of a row from its products, in their place; the largest is returned. */
INLINE TARGET float score_row(const Part *part, int row, Lanes *scores, const Grid *keys, int all) {
    const PagedAttention *attention = part->attention;
    const int coded = attention->pages->key_bits < 16;
    __m512 most = _mm512_set1_ps(UNSEEN);
    for (int64_t i = 0; i < part->num_strips; i++) {
        Lanes score = scores[i];
        if (coded) score = score * keys[i].scale + keys[i].middle * lanes_of(part->query_sum[row]);
        score *= lanes_of(attention->scale);
        if (attention->softcap != 0) score = soft_cap(score, attention->softcap);
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
    const int coded = part->attention->pages->value_bits < 16;
    const Lanes largest = lanes_of(result->largest[row]);
    Lanes sum = {0}, middles = {0};
    for (int64_t i = 0; i < part->num_strips; i++) {
        IntLanes seen = {0};
        Lanes weight = (Lanes)exp_below((__m512)(scores[i] - largest));
        if (!all) {
            seen = visible(part, row, &part->strips[i]);
            weight = lanes_select(seen, weight, (Lanes){0});
        }
        sum += weight;
        if (coded) {
            const Lanes middle = weight * values[i].middle;
            weight *= values[i].scale;
            middles += all ? middle : lanes_select(seen, middle, (Lanes){0});
            if (!all) weight = lanes_select(seen, weight, (Lanes){0});
        }
        store_factors(weights + i * STRIP, weight);
    }
    result->sum[row] = result->sum[row] * left + _mm512_reduce_add_ps((__m512)sum);
    return _mm512_reduce_add_ps((__m512)middles);
}

/* Fetches what of the next part's keys lies as far into a strip as `word` does into its values. */
INLINE TARGET void fetch_keys(const Part *part, int64_t strip, int64_t plane, int64_t line, const int lines) {
    const KvPages *pages = part->attention->pages;
    if (strip >= part->num_next || plane >= pages->key_bits / 4) return;
    const int64_t per_plane = pages->key_bits >= 16 ? 0 : pages->head_dim / 8;
    const uint32_t *words = part->next[strip].keys + (plane * per_plane + line) * pages->block_size;
    for (int i = 0; i < lines; i++) fetch(words + i * pages->block_size);
}

INLINE TARGET void add_exact_values(const Part *part, const Weights *weights, int64_t d, __m512 (*sum)[8], const int width,
                                    const int columns) {
    const int64_t size = part->attention->pages->head_dim;
    const int is_wide = part->attention->pages->value_bits == 32;
    for (int64_t i = 0; i < part->num_strips; i++) {
        const uint32_t *words = part->strips[i].values + d;
        for (int token = 0; token < STRIP; token += 2, words += is_wide ? 2 * size : size) {
            Pairs value[8];
            for (int column = 0; column < columns; column++) {
                const uint32_t *from = words + column * LANES;
                value[column] = is_wide ? wide(load_words(from), load_words(from + size)) : numbers(load_words(from));
            }
            fetch_keys(part, i, 0, is_wide ? d + token * columns : d / 2 + token / 2 * columns, is_wide ? 2 * columns : columns);
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
            const uint32_t *words = part->strips[i].values + plane * pages->block_size / 8 * size + d;
            for (int token = 0; token < STRIP; token += 8, words += size) {
                __m512i coded[8];
                for (int column = 0; column < columns; column++) coded[column] = load_words(words + column * LANES);
                fetch_keys(part, i, plane, d / 8 + token / 8 * columns, columns);
                if (bits == 4) fetch_keys(part, i, 1, d / 8 + token / 8 * columns, columns);
#pragma GCC unroll 4
                for (int pair = 0; pair < 4; pair++) {
                    Pairs value[8];
                    for (int column = 0; column < columns; column++) value[column] = decoded(coded[column], table, pair);
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
        keys[i] = load_grid(part->strips[i].key_scales, pages->block_size, pages->key_bits);
        values[i] = load_grid(part->strips[i].value_scales, pages->block_size, pages->value_bits);
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
