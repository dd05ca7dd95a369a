/* Chunks of rows of a search or a rounding, compiled for every instruction set. */
#ifndef NATIVE_ROUNDING_TASKS_H
#define NATIVE_ROUNDING_TASKS_H

#include "common/thread_pool.h"
#include "rounding/ranges.h"

/* A search or an encoding over `rows`, `per_chunk` in each chunk. */
typedef struct {
    const void *job;
    int64_t rows, per_chunk;
} Rows;

#define TASK_OF(name, Job, row_of, set)                                                                                \
    void name##_##set(void *context, int64_t chunk) {                                                                  \
        const Rows *all = context;                                                                                     \
        const int64_t stop = (chunk + 1) * all->per_chunk < all->rows ? (chunk + 1) * all->per_chunk : all->rows;      \
        for (int64_t row = chunk * all->per_chunk; row < stop; row++) row_of((const Job *)all->job, row);              \
    }

void search_rows_scalar(void *context, int64_t chunk);
void encode_rows_scalar(void *context, int64_t chunk);
#if ON_X86
void search_rows_avx2(void *context, int64_t chunk);
void encode_rows_avx2(void *context, int64_t chunk);
void search_rows_avx512(void *context, int64_t chunk);
void encode_rows_avx512(void *context, int64_t chunk);
#endif

#endif
