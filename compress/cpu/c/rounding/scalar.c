/* The search and the rounding in plain C. */
#include "common/simd.h"

enum { STRIP_WIDTH = 4 };
typedef float Strip __attribute__((vector_size(4 * STRIP_WIDTH)));
typedef int32_t StripBits __attribute__((vector_size(4 * STRIP_WIDTH)));
typedef uint8_t CodeStrip __attribute__((vector_size(STRIP_WIDTH)));

INLINE Strip strip_clamp(Strip x, Strip low, Strip high) {
    for (int lane = 0; lane < STRIP_WIDTH; lane++) {
        x[lane] = x[lane] > low[lane] ? x[lane] : low[lane];
        x[lane] = x[lane] < high[lane] ? x[lane] : high[lane];
    }
    return x;
}

#include "rounding/step.h"

TASK_OF(search_rows, RangeSearch, search_row, scalar)
TASK_OF(encode_rows, GroupEncoding, encode_row, scalar)
TASK_OF(value_rows, LearnedRounding, value_row, scalar)
TASK_OF(step_rows, LearnedRounding, step_row, scalar)
