/* One row of scores in blocks, with the highest of each block: whoever looks for high scores skips most blocks. */
#ifndef NATIVE_SAMPLING_ROW_H
#define NATIVE_SAMPLING_ROW_H

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "common/simd.h"

enum { BLOCK = 4 * LANES };

typedef struct {
    int64_t vocab, blocks;
    float *scores; /* [blocks * BLOCK], minus infinity behind the vocabulary */
    float *peaks;  /* [blocks] */
    float *room;   /* [blocks * BLOCK] */
    float highest;
} Row;

/* Memory of a row; `scores` is NULL where there is none. */
static inline Row make_row(int64_t vocab) {
    Row row = {.vocab = vocab, .blocks = (vocab + BLOCK - 1) / BLOCK};
    const int64_t size = row.blocks * BLOCK;
    row.scores = malloc((size_t)(2 * size + row.blocks) * sizeof *row.scores);
    if (row.scores) row.room = row.scores + size, row.peaks = row.room + size;
    return row;
}

static inline void free_row(Row *row) { free(row->scores); }

INLINE int64_t in_block(const Row *row, int64_t block) {
    const int64_t rest = row->vocab - block * BLOCK;
    return rest < BLOCK ? rest : BLOCK;
}

/* All bits in lanes whose bit of `bits` is set. */
INLINE IntLanes lanes_of_bits(uint32_t bits) {
    const WordLanes places = {31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16};
    return lanes_negative((IntLanes)(((WordLanes){0} + bits) << places));
}

/* Bits of the tokens of a block. */
INLINE uint64_t mask_word(const uint8_t *mask, int64_t num_bytes, int64_t block) {
    const int64_t first = block * (BLOCK / 8), rest = num_bytes - first;
    uint64_t word = 0;
    if (rest > 0) memcpy(&word, mask + first, (size_t)(rest < 8 ? rest : 8));
    return word;
}

/* Fills scores and peaks from finite logits, or from scores in place. Returns whether all numbers were finite. */
INLINE int fill_row(Row *row, const float *logits, const uint8_t *mask, int64_t mask_bytes, float temperature) {
    Lanes nothing = {0}, highest = lanes_of(-INFINITY); /* NaN where a number is not finite */
    for (int64_t block = 0; block < row->blocks; block++) {
        float end[BLOCK] = {0};
        const float *from = logits + block * BLOCK;
        const int64_t count = in_block(row, block);
        if (count < BLOCK) from = memcpy(end, from, (size_t)count * sizeof *end);
        uint64_t allowed = mask ? mask_word(mask, mask_bytes, block) : ~(uint64_t)0;
        if (count < BLOCK) allowed &= ((uint64_t)1 << count) - 1;
        Lanes most = lanes_of(-INFINITY);
        for (int64_t i = 0; i < BLOCK; i += LANES, allowed >>= LANES) {
            Lanes x = lanes_load(from + i);
            nothing += x * lanes_of(0.0f);
            if (temperature != 1) x = lanes_max(x / lanes_of(temperature), lanes_of(-FLT_MAX)); /* infinity is masked only */
            if ((allowed & 0xffff) != 0xffff) x = lanes_select(lanes_of_bits((uint32_t)allowed), x, lanes_of(-INFINITY));
            lanes_store(row->scores + block * BLOCK + i, x);
            most = lanes_max(most, x);
        }
        highest = lanes_max(highest, most);
        row->peaks[block] = highest_lane(most);
    }
    row->highest = highest_lane(highest);
    return sum_of_lanes(nothing) == 0;
}

/* The k-th highest of `count` numbers, which it reorders. */
static inline float select_highest(float *x, int64_t count, int64_t k) {
    int64_t first = 0, stop = count;
    for (;;) {
        const float a = x[first], b = x[(first + stop) / 2], c = x[stop - 1];
        const float pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t above = first, below = stop;
        for (int64_t i = first; i < below;) {
            const float here = x[i];
            if (here > pivot) x[i++] = x[above], x[above++] = here;
            else if (here < pivot) x[i] = x[--below], x[below] = here;
            else i++;
        }
        if (k <= above) stop = above;
        else if (k <= below) return pivot;
        else first = below;
    }
}

/* The k-th highest score; k is at most the size of the vocabulary. At least k scores are not below the k-th of the highest
 * ones of blocks, and few are above it. */
INLINE float kth_score(const Row *row, int64_t k) {
    float least = -INFINITY;
    if (k <= row->blocks) {
        memcpy(row->room, row->peaks, (size_t)row->blocks * sizeof *row->room);
        least = select_highest(row->room, row->blocks, k);
    }
    int64_t count = 0;
    for (int64_t block = 0; block < row->blocks; block++) {
        if (row->peaks[block] < least) continue;
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
            row->room[count] = row->scores[i];
            count += row->scores[i] >= least;
        }
    }
    return select_highest(row->room, count, k);
}

/* Farther below the highest score, a million tokens add nothing to a sum. */
#define NEGLIGIBLE 80.0f

/* Sum of e^(score - highest) over scores that are not below `least`, which is finite. */
INLINE double mass_from(const Row *row, float least) {
    double sum = 0;
    for (int64_t block = 0; block < row->blocks; block++) {
        if (row->peaks[block] < least) continue;
        Lanes here = {0};
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) {
            const Lanes x = lanes_load(row->scores + i);
            const Lanes e = lanes_exp(lanes_max(x - lanes_of(row->highest), lanes_of(-NEGLIGIBLE)));
            here += lanes_select(lanes_below(x, lanes_of(least)), (Lanes){0}, e);
        }
        sum += (double)sum_of_lanes(here);
    }
    return sum;
}

#endif
