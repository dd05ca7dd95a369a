/* One part in plain C, for instruction sets below AVX-512. Files that include this begin with the pragma of their target:
 * what is only inlined into a function for a target is taken apart by GCC before. They define LANES_OF_PIECE, the floats of one
 * register: sums of products are kept in pieces of that size, since GCC moves wider ones through memory. */
#include "attention/part.h"

enum { PIECES = LANES / LANES_OF_PIECE, MOST_SUMS = 8 /* that stay in registers */ };

typedef float Piece __attribute__((vector_size(4 * LANES_OF_PIECE)));
typedef int32_t IntPiece __attribute__((vector_size(4 * LANES_OF_PIECE)));
typedef uint32_t WordPiece __attribute__((vector_size(4 * LANES_OF_PIECE)));

INLINE Piece piece_of(float x) { return x - (Piece){0}; }

/* Pieces that are summed up together. */
INLINE int pieces_abreast(int width) { return PIECES < MOST_SUMS / width ? PIECES : MOST_SUMS / width; }

INLINE int members_of(int bits) { return bits < 16 ? 8 : 32 / bits; }

/* Member j of words of 4-bit codes, less the middle code; of 8-bit codes the `plane` 0 or 1. */
INLINE Piece centred(WordPiece word, int64_t j, int64_t bits, int64_t plane) {
    Piece code = __builtin_convertvector((IntPiece)(word >> (uint32_t)word_bit(j) & 15), Piece);
    if (bits == 8 && plane == 0) return code;
    code -= piece_of(8.0f);
    return bits == 8 ? code * piece_of(16.0f) : code;
}

INLINE Piece member(WordPiece word, int64_t j, int64_t bits, int64_t plane) {
    if (bits == 32) return (Piece)word;
    if (bits == 16) return (Piece)(j ? word & 0xffff0000u : word << 16);
    return centred(word, j, bits, plane);
}

INLINE WordPiece load_words(const uint32_t *from) {
    WordPiece words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* Adds the members of `abreast` pieces of words, times `factors` of each row. */
INLINE void add_words(const uint32_t *from, const float *factors, int64_t factors_row, int64_t plane, Piece (*sums)[PIECES],
                      const int bits, const int width, const int abreast) {
    WordPiece words[PIECES];
    for (int p = 0; p < abreast; p++) words[p] = load_words(from + p * LANES_OF_PIECE);
#pragma GCC unroll 8
    for (int j = 0; j < members_of(bits); j++)
#pragma GCC unroll 4
        for (int p = 0; p < abreast; p++) {
            const Piece x = member(words[p], j, bits, plane);
#pragma GCC unroll 8
            for (int row = 0; row < width; row++) sums[row][p] += x * piece_of(factors[row * factors_row + j]);
        }
}

INLINE void store_pieces(Piece (*sums)[PIECES], Lanes *to, int piece, const int width, const int abreast) {
    for (int row = 0; row < width; row++)
        memcpy((float *)&to[row] + piece * LANES_OF_PIECE, sums[row], (size_t)abreast * sizeof(Piece));
}

/* Products of each row's query with the sixteen tokens of a strip. Where it is read, the same place of the next one is fetched. */
INLINE void multiply_keys(const Part *part, const Strip *strip, const Strip *next, Lanes *products, const int bits, const int width) {
    const int64_t size = part->attention->pages->head_dim, step = part->attention->pages->block_size;
    const int abreast = pieces_abreast(width);
    for (int piece = 0; piece < PIECES; piece += abreast) {
        Piece sums[TILE][PIECES] = {0};
        int64_t at = piece * LANES_OF_PIECE;
        for (int64_t plane = 0; plane < (bits == 8 ? 2 : 1); plane++)
            for (int64_t d = 0; d < size; d += members_of(bits), at += step) {
                if (next && !piece) fetch(next->keys + at);
                add_words(strip->keys + at, part->query[0] + d, LONGEST_HEAD, plane, sums, bits, width, abreast);
            }
        store_pieces(sums, products, piece, width, abreast);
    }
}

/* Sixteen dimensions of the weighted sum of values. */
INLINE void multiply_values(const Part *part, int64_t d, const float *weights, Lanes *products, const int bits, const int width) {
    const int64_t size = part->attention->pages->head_dim, plane_words = part->attention->pages->block_size / 8 * size;
    const int abreast = pieces_abreast(width);
    for (int piece = 0; piece < PIECES; piece += abreast) {
        Piece sums[TILE][PIECES] = {0};
        for (int64_t i = 0; i < part->num_strips; i++) {
            const Strip *next = next_strips(part, i, 1);
            for (int64_t plane = 0; plane < (bits == 8 ? 2 : 1); plane++)
                for (int64_t token = 0; token < STRIP; token += members_of(bits)) {
                    const int64_t at = plane * plane_words + token / members_of(bits) * size + d + piece * LANES_OF_PIECE;
                    if (next && !piece) fetch(next->values + at);
                    add_words(part->strips[i].values + at, weights + i * STRIP + token, PART, plane, sums, bits, width, abreast);
                }
        }
        store_pieces(sums, products, piece, width, abreast);
    }
}

/* Turns a row's scores into weights of what stands in the pages: the scale of values goes into the weights; the share of
 * what their codes are centred on, the same for all dimensions, is returned. Adds weights to the row's sum, of which
 * `left` is what is left. */
INLINE float to_weights(const Part *part, int row, Lanes *scores, const Grid *values, int all, PartResult *result, float *left) {
    Lanes most = lanes_of(UNSEEN), sum = {0}, middles = {0};
    for (int64_t i = 0; i < part->num_strips; i++) most = lanes_max(most, scores[i]);
    *left = raise_largest(result, row, largest_lane(most));
    for (int64_t i = 0; i < part->num_strips; i++) {
        Lanes weight = lanes_exp(scores[i] - lanes_of(result->largest[row]));
        Lanes middle = weight * values[i].middle, scaled = weight * values[i].scale;
        if (!all) {
            const IntLanes seen = visible(part, row, &part->strips[i]);
            weight = lanes_select(seen, weight, (Lanes){0});
            middle = lanes_select(seen, middle, (Lanes){0});
            scaled = lanes_select(seen, scaled, (Lanes){0});
        }
        sum += weight, middles += middle;
        scores[i] = scaled;
    }
    result->sum[row] = result->sum[row] * *left + sum_of_lanes(sum);
    return sum_of_lanes(middles);
}

#define FOR_BITS(bits, call)                                                                                          \
    switch (bits) {                                                                                                   \
        case 4: call(4); break;                                                                                       \
        case 8: call(8); break;                                                                                       \
        case 16: call(16); break;                                                                                     \
        default: call(32); break;                                                                                     \
    }

INLINE void attend(const Part *part, PartResult *result, const int width) {
    const KvPages *pages = part->attention->pages;
    Lanes scores[TILE][STRIPS], lanes[TILE];
    Grid values[STRIPS];
    float middles[TILE], left[TILE];
    const int all = sees_all(part);
    for (int64_t i = 0; i < part->num_strips; i++) {
        const Strip *strip = &part->strips[i], *next = next_strips(part, i, 1);
        const Grid keys = load_grid(strip->key_scales, pages->block_size, pages->key_bits);
        values[i] = load_grid(strip->value_scales, pages->block_size, pages->value_bits);
        if (next) fetch_scales(pages, next);
#define MULTIPLY_KEYS(bits) multiply_keys(part, strip, next, lanes, bits, width)
        FOR_BITS(pages->key_bits, MULTIPLY_KEYS)
        for (int row = 0; row < width; row++) scores[row][i] = to_scores(part, row, strip, lanes[row], keys, all);
    }
    for (int row = 0; row < width; row++) middles[row] = to_weights(part, row, scores[row], values, all, result, &left[row]);
    for (int64_t d = 0; d < pages->head_dim; d += LANES) {
#define MULTIPLY_VALUES(bits) multiply_values(part, d, (const float *)scores, lanes, bits, width)
        FOR_BITS(pages->value_bits, MULTIPLY_VALUES)
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
