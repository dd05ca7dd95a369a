/* Chunks of rows of a search or a rounding, compiled for every instruction set. */
#ifndef NATIVE_ROUNDING_TASKS_H
#define NATIVE_ROUNDING_TASKS_H

#include "common/thread_pool.h"
#include "rounding/ranges.h"

/* Work on `rows`, `per_chunk` in each chunk; `enough` numbers make a chunk. */
typedef struct {
    const void *job;
    int64_t rows, per_chunk;
} Rows;

INLINE void run_rows(PoolTask task, const void *job, int64_t rows, int64_t columns, int64_t enough) {
    Rows all = {job, rows, columns < enough ? enough / columns : 1};
    pool_run(task, &all, (rows + all.per_chunk - 1) / all.per_chunk);
}

#define TASK_OF(name, Job, row_of, set)                                                                                \
    void name##_##set(void *context, int64_t chunk) {                                                                  \
        const Rows *all = context;                                                                                     \
        const int64_t stop = (chunk + 1) * all->per_chunk < all->rows ? (chunk + 1) * all->per_chunk : all->rows;      \
        for (int64_t row = chunk * all->per_chunk; row < stop; row++) row_of((const Job *)all->job, row);              \
    }

void search_rows_scalar(void *context, int64_t chunk);
void encode_rows_scalar(void *context, int64_t chunk);
void value_rows_scalar(void *context, int64_t chunk);
void step_rows_scalar(void *context, int64_t chunk);
#if ON_X86
void search_rows_avx2(void *context, int64_t chunk);
void encode_rows_avx2(void *context, int64_t chunk);
void value_rows_avx2(void *context, int64_t chunk);
void step_rows_avx2(void *context, int64_t chunk);
void search_rows_avx512(void *context, int64_t chunk);
void encode_rows_avx512(void *context, int64_t chunk);
void value_rows_avx512(void *context, int64_t chunk);
void step_rows_avx512(void *context, int64_t chunk);
#endif

#endif
