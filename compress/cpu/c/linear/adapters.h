/* Products of low-rank adapters (LoRA): y += (x down^T) up, for each row those of the adapter in the row's slot. Activations and
 * factors are bfloat16, sums float32, y is rounded once; a row's result depends on that row alone. */
#ifndef NATIVE_ADAPTERS_H
#define NATIVE_ADAPTERS_H

#include <stdint.h>

#include "common/dispatch.h"

enum { RANK_MULTIPLE = 4 };

/* Rows of both factors, RANK_MULTIPLE divides their number, and the columns of y that they add to. */
typedef struct {
    int64_t first, count, column, num_columns;
} AdapterPart;

/* Adapters of one linear [O, I], one below the other; parts of a slot follow each other in rows as well. */
typedef struct {
    int64_t in_features, out_features; /* both, and columns of parts, are multiples of 16 */
    int64_t most_rank;                 /* of a slot; 0: no adapter changes this linear */
    const uint16_t *down, *up;         /* [R, I] and [R, O] */
    const AdapterPart *parts;
    const int64_t *starts;             /* [slots + 1]: the first part of each */
} Adapters;

/* x [rows, I] and y [rows, O]; slots [rows], -1 for no adapter. 0, or less: an instruction set that this machine lacks, or no
 * memory. */
EXPORT int adapters_add(const Adapters *adapters, const int64_t *slots, int64_t rows, const uint16_t *x, uint16_t *y,
                        int instruction_set);

#endif
