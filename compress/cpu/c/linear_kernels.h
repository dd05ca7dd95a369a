/* The functions of an instruction set for float32 and for 8-bit activations, and the tables that name them. A file that includes
 * this also defines UNDECODED_BLOCKS, those of its float32 kernels. */
#include "linear_float32.h"
#include "linear_levels.h"
#include "linear_sparse.h"

RUN_KERNEL(float32, 2) RUN_KERNEL(float32, 4) RUN_KERNEL(float32, 8) RUN_KERNEL(float32, 16) RUN_KERNEL(float32, 32)
RUN_KERNEL(sparse, 3)
RUN_KERNEL(levels, 2) RUN_KERNEL(levels, 4) RUN_KERNEL(levels, 8)
DECODE_KERNEL(float32, 2) DECODE_KERNEL(float32, 4) DECODE_KERNEL(float32, 8)
DECODE_KERNEL(sparse, 3)

/* `decode_numbers` is NULL where widening them again for each block of rows takes no longer than reading them twice as wide. */
#define FLOAT32_KERNELS(decode_numbers)                                                                               \
    {MOST_ROWS,                                                                                                       \
     UNDECODED_BLOCKS,                                                                                                \
     32,                                                                                                              \
     {run_float32_2, run_float32_4, run_float32_8, run_float32_16, run_float32_32, run_sparse_3},                     \
     {decode_float32_2, decode_float32_4, decode_float32_8, decode_numbers, NULL, decode_sparse_3}}
#define LEVELS_KERNELS {MOST_ROWS, 0, 0, {run_levels_2, run_levels_4, run_levels_8}, {NULL}}
