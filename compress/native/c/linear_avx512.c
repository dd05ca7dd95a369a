#include "dispatch.h"

#if ON_X86

#define TARGET FOR_AVX512
#include "linear_avx512.h"

RUN_KERNELS_6(float32, 2) RUN_KERNELS_6(float32, 4) RUN_KERNELS_6(float32, 8)
RUN_KERNELS_6(float32, 16) RUN_KERNELS_6(float32, 32) RUN_KERNELS_6(sparse, 3)
RUN_KERNELS_6(levels, 2) RUN_KERNELS_6(levels, 4) RUN_KERNELS_6(levels, 8)
DECODE_KERNEL(float32, 2) DECODE_KERNEL(float32, 4) DECODE_KERNEL(float32, 8)
DECODE_KERNEL(sparse, 3)

const KernelKind avx512_float32 = {6, 32,
                                   {RUN_NAMES_6(float32, 2), RUN_NAMES_6(float32, 4), RUN_NAMES_6(float32, 8),
                                    RUN_NAMES_6(float32, 16), RUN_NAMES_6(float32, 32), RUN_NAMES_6(sparse, 3)},
                                   {float32_2, float32_4, float32_8, NULL, NULL, sparse_3}};
const KernelKind avx512_levels = {6, 0,
                                  {RUN_NAMES_6(levels, 2), RUN_NAMES_6(levels, 4), RUN_NAMES_6(levels, 8)},
                                  {NULL}};

#endif
