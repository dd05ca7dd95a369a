/* Activations as the kernels of linear_tiles.h want them. */
#ifndef NATIVE_LINEAR_PREPARE_H
#define NATIVE_LINEAR_PREPARE_H

#include "linear_tiles.h"

/* What one call of linear_multiply works on. */
typedef struct {
    const LinearWeight *weight;
    const KernelKind *kernels;
    NumberType type; /* of x and y */
    Activations activations;
    const void *x;
    int64_t x_stride, rows;
    void *y;
    int64_t y_stride;
    void *converted; /* [rows][I], where activations are not taken as they come */
    float *sums;
    int32_t *level_sums;
    Prepared prepared;
    int64_t rows_per_chunk, tiles_per_chunk, num_tiles;
} LinearCall;

/* One row: converts it and sums up its runs. */
void prepare_row(const LinearCall *call, int64_t row);

/* The largest number of inputs that divides a group and is at most LONGEST_RUN. */
int64_t run_of(int64_t group);

#endif
