/* The kernels of matrix tiles in plain C, with the same bits, for tests on machines that have none. */
#include <math.h>

#define EMULATED_TILES
#define PER_VECTOR 16
#define VECTORS 4
#define MOST_ROWS 1
#include "linear/plain.h"

INLINE Floats floats_fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < PER_VECTOR; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

#include "linear/matrix.inc"

const KernelKind emulated_bfloat16 = MATRIX_PAIR_KERNELS;
const KernelKind emulated_q8 = MATRIX_BYTE_KERNELS;
