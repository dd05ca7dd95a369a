#include "dispatch.h"

#if ON_X86

#define TARGET FOR_AVX512
#define UNDECODED_BLOCKS 6
#include "linear_avx512.h"
#include "linear_kernels.h"

const KernelKind avx512_float32 = FLOAT32_KERNELS(NULL);
const KernelKind avx512_levels = LEVELS_KERNELS;

#endif
