/* The inner loop of GPTQ and SparseGPT: a short stretch of columns, one after the other.
 *
 * All matrices are transposed: row i is column i of the weight, and neighbours in memory are its outputs. Outputs do not
 * know of each other, so they are worked on side by side, and threads share them out: neither the instruction set nor
 * the number of threads changes the order in which anything is added, nor any bit of the result.
 */
#ifndef NATIVE_COLUMNS_H
#define NATIVE_COLUMNS_H

#include <stdint.h>

#include "common/dispatch.h"

typedef struct {
    int64_t outputs;         /* length of a row of targets, errors, codes and kept */
    int64_t first, count;    /* the stretch of columns */
    float *targets;          /* [columns, outputs]: plus all feedback from before; the new value where nothing is rounded */
    float *errors;           /* [columns, outputs]: in, the original; out, the original minus the new value */
    const float *feedback;   /* [columns, columns]: row j, column i is what error j feeds back to column i */
    int64_t feedback_row, feedback_column; /* strides */
    uint8_t *codes;          /* [columns, outputs], or NULL where nothing is rounded */
    const float *scale;      /* [groups, outputs] */
    const float *zero;       /* [groups, outputs], whole numbers */
    const int64_t *group;    /* [columns]: row of scale and zero */
    float max_code;
    uint8_t *kept;           /* [columns, outputs], 0 where a weight is pruned, or NULL where nothing is */
    const float *spread;     /* [columns]: of SparseGPT's score; read with a pattern only */
    int64_t pattern_kept, pattern_of; /* N:M, chosen on the way into `kept`; pattern_of = 0 chooses nothing */
} ColumnStretch;

/* Changes every column of the stretch; 0, or -1 for an instruction set this machine lacks or a stretch that is too long
 * (64 columns). A pattern must divide `count` and have at most 16 members. */
EXPORT int columns_change(ColumnStretch *stretch, int instruction_set);

#endif
