/* Ranges of groups of weights, and codes within them.
 *
 * A group is `group` neighbours of a row that share a scale and a zero point. The search tries parts of the group's range, then
 * scales and zero points close to the best, and keeps the first of those with the least error
 *     sum of importance * (rounded - weight)^2,
 * each scale rounded to the dtype that stores it. The sum has 16 partial sums, one for each place of a number among 16 neighbours;
 * then the second half of them is added to the first until one is left. Neither the instruction set nor the number of threads
 * changes any bit.
 */
#ifndef NATIVE_RANGES_H
#define NATIVE_RANGES_H

#include <stdint.h>

#include "common/dispatch.h"

enum { SCALES_FLOAT32, SCALES_BFLOAT16, SCALES_FLOAT16, MOST_TRIALS = 64, MOST_KEPT = 16 };

typedef struct {
    int64_t rows, columns, group;
    const float *weight;     /* [rows, columns] */
    const float *importance; /* [columns] */
    int64_t symmetric, scale_dtype;
    float midpoint, max_code; /* the zero point of symmetric codes; the largest code */
    int64_t parts, neighbours; /* to try; behind them the last one comes again; the first part is kept where no error is finite, */
                               /* or where it is the only one */
    /* Shares of the negative and the positive side of the range; symmetric: `below` is the scale for a largest element of 1. */
    float below[MOST_TRIALS], above[MOST_TRIALS];
    float factor[MOST_TRIALS], shift[MOST_TRIALS]; /* of the best scale, added to the best zero point */
    int64_t kept;   /* ranges of each group to return, at most MOST_KEPT, the best first; fewer than there are of them come again */
    float *scales;  /* [rows, groups, kept], values of their dtype; never zero */
    uint8_t *zeros; /* [rows, groups, kept] */
} RangeSearch;

/* Finds scales and zero points, those of equal error in the order of trials; 0, or -1 for an instruction set this machine lacks. */
EXPORT int ranges_search(const RangeSearch *search, int instruction_set);

typedef struct {
    int64_t rows, columns, group;
    const float *weight;  /* [rows, columns] */
    const float *scales;  /* [rows, groups] */
    const uint8_t *zeros; /* [rows, groups] */
    float max_code;
    uint8_t *codes;       /* [rows, columns], or NULL */
    float *values;        /* [rows, columns], or NULL: what the codes stand for */
} GroupEncoding;

/* Rounds to the nearest codes, half to even; 0, or -1 for an instruction set this machine lacks. */
EXPORT int groups_encode(const GroupEncoding *encoding, int instruction_set);

#endif
