/* One part in plain C, for instruction sets below AVX-512. Files that include this begin with the pragma of their target:
 * what is only inlined into a function for a target is taken apart by GCC before. */
#include "attention/part.h"

/* Member j of sixteen words of 4-bit codes, less the middle code; of 8-bit codes the `plane` 0 or 1. */
INLINE Lanes centred(WordLanes word, int64_t j, int64_t bits, int64_t plane) {
    Lanes code = __builtin_convertvector((IntLanes)(word >> word_bit(j) & 15), Lanes);
    if (bits == 8 && plane == 0) return code;
    code -= lanes_of(8.0f);
    return bits == 8 ? code * lanes_of(16.0f) : code;
}

INLINE Lanes member(WordLanes word, int64_t j, int64_t bits, int64_t plane) {
    if (bits == 32) return (Lanes)word;
    if (bits == 16) return (Lanes)(j ? word & 0xffff0000u : word << 16);
    return centred(word, j, bits, plane);
}

INLINE WordLanes load_words(const uint32_t *from) {
    WordLanes words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* Products of each row's query with the sixteen tokens of strip `i`. Where it is read, the same place of the next part's is fetched. */
INLINE void multiply_keys(const Part *part, int64_t i, Lanes *products, const int width) {
    const KvPages *pages = part->attention->pages;
    const int64_t bits = pages->key_bits, members = bits < 16 ? 8 : 32 / bits, planes = bits == 8 ? 2 : 1;
    const Strip *strip = &part->strips[i], *next = next_strips(part, i, 1);
    int64_t at = 0;
    if (next) fetch_scales(pages, next);
    for (int row = 0; row < width; row++) products[row] = (Lanes){0};
    for (int64_t plane = 0; plane < planes; plane++)
        for (int64_t d = 0; d < pages->head_dim; d += members, at += pages->block_size) {
            const WordLanes word = load_words(strip->keys + at);
            if (next) fetch(next->keys + at);
            for (int64_t j = 0; j < members; j++) {
                const Lanes x = member(word, j, bits, plane);
                for (int row = 0; row < width; row++)
                    products[row] += x * lanes_of(part->query[row][d + j]);
            }
        }
}

/* Sixteen dimensions of the weighted sum of values. */
INLINE void multiply_values(const Part *part, int64_t d, Lanes weights[TILE][STRIPS], Lanes *sums, const int width) {
    const KvPages *pages = part->attention->pages;
    const int64_t bits = pages->value_bits, members = bits < 16 ? 8 : 32 / bits, planes = bits == 8 ? 2 : 1;
    for (int row = 0; row < width; row++) sums[row] = (Lanes){0};
    for (int64_t i = 0; i < part->num_strips; i++) {
        const Strip *strip = &part->strips[i], *next = next_strips(part, i, 1);
        for (int64_t plane = 0; plane < planes; plane++) {
            int64_t at = plane * pages->block_size / 8 * pages->head_dim + d;
            for (int64_t token = 0; token < STRIP; token += members, at += pages->head_dim) {
                const WordLanes word = load_words(strip->values + at);
                if (next) fetch(next->values + at);
                for (int64_t j = 0; j < members; j++) {
                    const Lanes x = member(word, j, bits, plane);
                    for (int row = 0; row < width; row++) sums[row] += x * lanes_of(weights[row][i][token + j]);
                }
            }
        }
    }
}

/* Turns a row's scores into weights of what stands in the pages: the scale of values goes into the weights; the share of
 * what their codes are centred on, the same for all dimensions, is returned. Adds weights to the row's sum, of which
 * `left` is what is left. */
INLINE float to_weights(const Part *part, int row, Lanes *scores, const Grid *values, PartResult *result, float *left) {
    Lanes most = lanes_of(UNSEEN), sum = {0}, middles = {0};
    for (int64_t i = 0; i < part->num_strips; i++) most = lanes_max(most, scores[i]);
    *left = raise_largest(result, row, largest_lane(most));
    for (int64_t i = 0; i < part->num_strips; i++) {
        const IntLanes seen = visible(part, row, &part->strips[i]);
        const Lanes weight = lanes_select(seen, lanes_exp(scores[i] - lanes_of(result->largest[row])), (Lanes){0});
        sum += weight;
        middles += lanes_select(seen, weight * values[i].middle, (Lanes){0});
        scores[i] = lanes_select(seen, weight * values[i].scale, (Lanes){0});
    }
    result->sum[row] = result->sum[row] * *left + sum_of_lanes(sum);
    return sum_of_lanes(middles);
}

INLINE void attend(const Part *part, PartResult *result, const int width) {
    const KvPages *pages = part->attention->pages;
    Lanes scores[TILE][STRIPS], lanes[TILE];
    Grid values[STRIPS];
    float middles[TILE], left[TILE];
    for (int64_t i = 0; i < part->num_strips; i++) {
        const Strip *strip = &part->strips[i];
        const Grid keys = load_grid(strip->key_scales, pages->block_size, pages->key_bits);
        values[i] = load_grid(strip->value_scales, pages->block_size, pages->value_bits);
        multiply_keys(part, i, lanes, width);
        for (int row = 0; row < width; row++) scores[row][i] = to_scores(part, row, strip, lanes[row], keys);
    }
    for (int row = 0; row < width; row++) middles[row] = to_weights(part, row, scores[row], values, result, &left[row]);
    for (int64_t d = 0; d < pages->head_dim; d += LANES) {
        multiply_values(part, d, scores, lanes, width);
        for (int row = 0; row < width; row++) {
            float *to = result->values + row * pages->head_dim + d;
            lanes_store(to, lanes_load(to) * lanes_of(left[row]) + (lanes[row] + lanes_of(middles[row])));
        }
    }
}

INLINE void attend_part(const Part *part, PartResult *result) {
    switch (part->width) {
        case 1: attend(part, result, 1); break;
        case 2: attend(part, result, 2); break;
        case 4: attend(part, result, 4); break;
        default: attend(part, result, TILE); break;
    }
}
