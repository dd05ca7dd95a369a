/* Plain C for every other processor. */
#define PER_VECTOR 4
#define VECTORS 2
#define MOST_ROWS 1
#define UNDECODED_BLOCKS 2
#include "linear/plain.h"

/* Two roundings: a fused operation would be a call of a function here. */
INLINE Floats floats_fma(Floats a, Floats b, Floats c) { return a * b + c; }

#include "linear/kernel.inc"

DECODE_KERNEL(float32, 16)

const KernelKind scalar_float32 = FLOAT32_KERNELS(decode_float32_16);
const KernelKind scalar_q8 = Q8_KERNELS;
