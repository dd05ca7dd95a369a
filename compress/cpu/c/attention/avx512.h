/* One part with vectors of AVX-512: 16-bit keys and values as they are, codes through a table. Members of words are taken
 * in pairs, neighbours of what is summed over. A file that includes this defines
 *     TARGET                                the attribute of its functions
 *     Factor                                what pairs are multiplied by, in memory
 *     Pairs, Table                          sixteen pairs; the sixteen numbers that codes stand for
 *     table_of(codes), store_factors(to, lanes)
 *     numbers(words), decoded(words, table, step)   pairs of sixteen words of bfloat16 numbers, or members 2 * step and
 *                                           2 * step + 1 of sixteen words of codes
 *     add_products(sum, pairs, factors)     sum + both products of every pair with two factors
 */
#include "attention/part.h"

enum { AHEAD = 1 }; /* strips that are fetched before they are needed */

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

INLINE TARGET void fetch(const uint32_t *words) { _mm_prefetch((const char *)words, _MM_HINT_T0); }

/* Products of each row's query with the sixteen tokens of a strip; `next` is fetched meanwhile. */
INLINE TARGET void multiply_exact_keys(const Part *part, const Queries *query, const Strip *strip, const Strip *next,
                                      Lanes *products, const int width) {
    const KvPages *pages = part->attention->pages;
    const int64_t step = pages->block_size;
    const uint32_t *words = strip->keys, *ahead = next->keys, *values = strip->values;
    __m512 even[TILE], odd[TILE];
    for (int row = 0; row < width; row++) even[row] = odd[row] = _mm512_setzero_ps();
    for (int64_t d = 0; d < pages->head_dim; d += 4, words += 2 * step, ahead += 2 * step, values += 2 * LANES) {
        const Pairs first = numbers(_mm512_loadu_si512(words)), second = numbers(_mm512_loadu_si512(words + step));
        fetch(ahead);
        fetch(ahead + step);
        fetch(values);
        fetch(values + LANES);
        for (int row = 0; row < width; row++) {
            even[row] = add_products(even[row], first, query->of[row] + d);
            odd[row] = add_products(odd[row], second, query->of[row] + d + 2);
        }
    }
    for (int row = 0; row < width; row++) products[row] = (Lanes)_mm512_add_ps(even[row], odd[row]);
}

INLINE TARGET void multiply_coded_keys(const Part *part, const Queries *query, const Strip *strip, const Strip *next,
                                      Lanes *products, const int width) {
    const KvPages *pages = part->attention->pages;
    const int64_t step = pages->block_size, bits = pages->key_bits;
    const uint32_t *words = strip->keys, *ahead = next->keys, *values = strip->values;
    __m512 even[TILE], odd[TILE];
    for (int row = 0; row < width; row++) even[row] = odd[row] = _mm512_setzero_ps();
    for (int64_t plane = 0; plane < bits / 4; plane++) {
        const Table table = code_table(bits, plane);
        for (int64_t d = 0; d < pages->head_dim; d += 8, words += step, ahead += step, values += LANES) {
            const __m512i coded = _mm512_loadu_si512(words);
            const Pairs a = decoded(coded, table, 0), b = decoded(coded, table, 1);
            const Pairs c = decoded(coded, table, 2), e = decoded(coded, table, 3);
            fetch(ahead);
            fetch(values);
            for (int row = 0; row < width; row++) {
                const Factor *factors = query->of[row] + d;
                even[row] = add_products(even[row], a, factors);
                odd[row] = add_products(odd[row], b, factors + 2);
                even[row] = add_products(even[row], c, factors + 4);
                odd[row] = add_products(odd[row], e, factors + 6);
            }
        }
    }
    for (int row = 0; row < width; row++) products[row] = (Lanes)_mm512_add_ps(even[row], odd[row]);
}

/* `columns` times sixteen dimensions from `d` of the weighted sum of values. */
INLINE TARGET void multiply_values(const Part *part, const Weights *weights, int64_t d, const float *middles,
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
                Pairs value[8];
                for (int column = 0; column < columns; column++)
                    value[column] = numbers(_mm512_loadu_si512(words + column * LANES));
                for (int row = 0; row < width; row++)
                    for (int column = 0; column < columns; column++)
                        sum[row][column] =
                            add_products(sum[row][column], value[column], weights->of[row] + i * STRIP + token);
            }
        }
    } else {
        for (int64_t plane = 0; plane < bits / 4; plane++) {
            const Table table = code_table(bits, plane);
            for (int64_t i = 0; i < part->num_strips; i++) {
                const uint32_t *words = part->strips[i].values + plane * pages->block_size / 8 * size + d;
                for (int token = 0; token < STRIP; token += 8, words += size)
                    for (int column = 0; column < columns; column++) {
                        const __m512i coded = _mm512_loadu_si512(words + column * LANES);
#pragma GCC unroll 4
                        for (int step = 0; step < 4; step++) {
                            const Pairs value = decoded(coded, table, step);
                            for (int row = 0; row < width; row++)
                                sum[row][column] = add_products(sum[row][column], value,
                                                                weights->of[row] + i * STRIP + token + 2 * step);
                        }
                    }
            }
        }
    }
    for (int row = 0; row < width; row++)
        for (int column = 0; column < columns; column++)
            lanes_store(result->values + row * size + d + column * LANES, (Lanes)sum[row][column] + lanes_of(middles[row]));
}

INLINE TARGET void attend(const Part *part, PartResult *result, const int width, const int columns) {
    const KvPages *pages = part->attention->pages;
    const int64_t size = pages->head_dim, count = part->num_strips;
    Lanes scores[TILE][STRIPS], products[TILE];
    Grid values[STRIPS];
    float middles[TILE];
    Queries queries;
    Weights weights;
    for (int row = 0; row < width; row++)
        for (int64_t d = 0; d < size; d += LANES)
            store_factors(queries.of[row] + d, lanes_load_bfloat16(part->query[row] + d));
    for (int64_t i = 0; i < count; i++) {
        const Strip *strip = &part->strips[i], *next = &part->strips[i + AHEAD < count ? i + AHEAD : i];
        const Grid keys = load_grid(strip->key_scales, pages->block_size, pages->key_bits);
        values[i] = load_grid(strip->value_scales, pages->block_size, pages->value_bits);
        if (pages->key_bits == 16)
            multiply_exact_keys(part, &queries, strip, next, products, width);
        else
            multiply_coded_keys(part, &queries, strip, next, products, width);
        for (int row = 0; row < width; row++) scores[row][i] = to_scores(part, row, strip, products[row], keys);
    }
    for (int row = 0; row < width; row++) {
        middles[row] = to_weights(part, row, scores[row], values, result);
        for (int64_t i = 0; i < count; i++) store_factors(weights.of[row] + i * STRIP, scores[row][i]);
    }
    int64_t d = 0;
    for (; d + columns * LANES <= size; d += columns * LANES) multiply_values(part, &weights, d, middles, result, width, columns);
    for (; d < size; d += 2 * LANES) multiply_values(part, &weights, d, middles, result, width, 2);
}

INLINE TARGET void attend_part(const Part *part, PartResult *result) {
    switch (part->width) {
        case 1: attend(part, result, 1, 8); break;
        case 2: attend(part, result, 2, 8); break;
        case 4: attend(part, result, 4, 4); break;
        default: attend(part, result, TILE, 2); break;
    }
}
