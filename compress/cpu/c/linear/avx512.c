#include "common/dispatch.h"

#if ON_X86

#define TARGET FOR_AVX512
#define UNDECODED_BLOCKS 6
#include "linear/avx512.h"
#include "linear/kernel.inc"

const KernelKind avx512_float32 = FLOAT32_KERNELS(NULL);
const KernelKind avx512_q8 = Q8_KERNELS;

#endif
