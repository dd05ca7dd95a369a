#include <stdlib.h>

#include "common/thread_pool.h"
#include "trellis/parts.h"

static const PoolTask TURN_ROW[NUM_INSTRUCTION_SETS] = BY_SET(turn_row);
static const PoolTask MULTIPLY_BLOCK[NUM_INSTRUCTION_SETS] = BY_SET(multiply_block);

int trellis_multiply(const TrellisWeight *weight, int type, int64_t rows, const void *x, int64_t x_stride, void *y,
                     int64_t y_stride, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    float *turned = malloc((size_t)(rows * weight->in_features) * sizeof *turned + 1);
    if (turned == NULL) return -2;
    TrellisCall call = {weight, type == 0, rows, x, x_stride, turned, y, y_stride};
    pool_run(TURN_ROW[set], &call, rows);
    pool_run(MULTIPLY_BLOCK[set], &call, (rows + TRELLIS_ROWS - 1) / TRELLIS_ROWS * (weight->out_features / TURN));
    free(turned);
    return 0;
}
