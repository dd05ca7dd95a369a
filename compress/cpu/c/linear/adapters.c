#include <stdlib.h>

#include "common/thread_pool.h"
#include "linear/adapter_rows.h"

static void reduce_scalar(void *call, int64_t chunk) { reduce_rows(call, chunk); }
static void expand_scalar(void *call, int64_t chunk) { expand_rows(call, chunk); }
#if ON_X86
void reduce_avx2(void *call, int64_t chunk);
void expand_avx2(void *call, int64_t chunk);
void reduce_avx512(void *call, int64_t chunk);
void expand_avx512(void *call, int64_t chunk);
#endif
static const PoolTask REDUCE[NUM_INSTRUCTION_SETS] = BY_SET(reduce);
static const PoolTask EXPAND[NUM_INSTRUCTION_SETS] = BY_SET(expand);

int adapters_add(const Adapters *adapters, const int64_t *slots, int64_t rows, const uint16_t *x, uint16_t *y,
                 int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    if (adapters->most_rank == 0 || rows < 1) return 0;
    float *reduced = malloc((size_t)(rows * adapters->most_rank) * sizeof *reduced);
    if (reduced == NULL) return -1;
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK, columns = (adapters->out_features + COLUMNS - 1) / COLUMNS;
    Call call = {adapters, slots, rows, columns, x, y, reduced};
    pool_run(REDUCE[set], &call, blocks);
    pool_run(EXPAND[set], &call, blocks * columns);
    free(reduced);
    return 0;
}
