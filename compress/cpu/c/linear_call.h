/* One call of linear_multiply: activations as kernels want them, products in chunks, results. */
#ifndef NATIVE_LINEAR_CALL_H
#define NATIVE_LINEAR_CALL_H

#include "linear_tiles.h"

/* Rows that share one pass over the weights and one decoded run: their sums stay in the second cache. */
enum { ROWS_PER_CHUNK = 128 };

typedef struct LinearCall LinearCall;
/* One row: converts it and sums up its runs. */
typedef void (*PrepareRow)(const LinearCall *call, int64_t row);
/* The sums of one row and tile, with the bias, as results. */
typedef void (*FinishRow)(const LinearCall *call, int64_t row, int64_t tile, float *sums);

/* What one call of linear_multiply works on. */
struct LinearCall {
    const LinearWeight *weight;
    const KernelKind *kernels;
    PrepareRow prepare;
    FinishRow finish;
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
};

extern const PrepareRow prepare_by_set[NUM_INSTRUCTION_SETS];
extern const FinishRow finish_by_set[NUM_INSTRUCTION_SETS];

/* rows_per_chunk rows by tiles_per_chunk tiles of a LinearCall; chunks of the same rows follow each other. */
void multiply_chunk(void *call, int64_t chunk);

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The largest number of inputs that divides a group and is at most LONGEST_RUN. */
int64_t run_of(int64_t group);

#endif
