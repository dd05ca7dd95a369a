/* From rows of scores to tokens, in one pass each. Rows are independent of each other. Functions return 0, or -1 for an
 * instruction set that this machine lacks. */
#ifndef NATIVE_SAMPLING_H
#define NATIVE_SAMPLING_H

#include <stdint.h>

#include "common/dispatch.h"

typedef struct {
    int64_t rows, vocab;
    const float *scores; /* [rows, vocab] */
    int64_t *highest;    /* [rows]: the first of the highest scores; any where one is NaN */
    uint8_t *finite;     /* [rows]: whether all are */
} PeakRows;

EXPORT int argmax_rows(const PeakRows *job, int instruction_set);

/* Draws by the Gumbel-max rule, with the noise of runtime/backends/torch/ops.py: a hash of seed, position and token, and two
 * logarithms. From the hash alone follows a bound that few sums of score and noise reach; the logarithms are computed
 * for those. */
typedef struct {
    int64_t rows, vocab;
    const float *scores; /* [rows, vocab], finite, or minus infinity where a token cannot be drawn */
    const int64_t *seeds, *positions; /* [rows] */
    int64_t *winners;    /* [rows]: the highest sum, or -1 where two are so close that rounding decides */
} NoisyRows;

EXPORT int gumbel_argmax_rows(const NoisyRows *job, int instruction_set);

#endif
