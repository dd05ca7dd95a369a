/* Matrix tiles of bfloat16 numbers and of bytes. */
#include "common/dispatch.h"

#if ON_X86

#define TARGET FOR_AMX
#include "linear/avx512.h"
#include "linear/matrix.inc"

const KernelKind amx_bfloat16 = MATRIX_PAIR_KERNELS;
const KernelKind amx_q8 = MATRIX_BYTE_KERNELS;

#endif
