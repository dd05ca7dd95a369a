/* Between trellis.c, which goes through a weight, and the instruction sets, which compile kernel.h. */
#ifndef NATIVE_TRELLIS_PARTS_H
#define NATIVE_TRELLIS_PARTS_H

#include "trellis/trellis.h"

/* Rows that share one decoding of the weight; their sums stay in the second cache. */
enum { TRELLIS_ROWS = 64 };

typedef struct {
    const TrellisWeight *weight;
    int is_wide; /* activations are float32, else bfloat16 */
    int64_t rows;
    const void *x;
    int64_t x_stride;
    float *turned; /* [rows][I], x * in_scales times H */
    void *y;
    int64_t y_stride;
} TrellisCall;

/* Tasks of the pool. Of one row: what the product reads. Of a chunk: up to TRELLIS_ROWS rows by TURN outputs; chunks of the same
 * rows follow each other. */
#define TRELLIS_TASKS(set)                                \
    void turn_row_##set(void *call, int64_t row);         \
    void multiply_block_##set(void *call, int64_t chunk);
TRELLIS_TASKS(scalar)
TRELLIS_TASKS(avx2)
TRELLIS_TASKS(avx512)

#endif
