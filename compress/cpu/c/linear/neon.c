/* NEON, which all 64-bit ARM processors have, and dot products of bytes, which most have. */
#include "common/dispatch.h"

#if ON_ARM

#define TARGET
#define UNDECODED_BLOCKS 2
#include "linear/neon.h"


DECODE_KERNEL(float32, 16)

const KernelKind neon_float32 = FLOAT32_KERNELS(decode_float32_16);
const KernelKind neon_q8 = Q8_KERNELS;

#undef TARGET
#define TARGET FOR_NEON_DOTPROD

/* In assembly: some compilers offer it only to code that never runs on a processor without it. */
INLINE TARGET Words dotprod_add(Words sum, Words codes, Words q8, int bits) {
    if (bits == 8) sum += words_lacking(q8), codes ^= 0x80808080;
    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(codes), "w"(q8));
    return sum;
}

static const Product dotprod_product = {4, sizeof(int8_t), q8_weights, q8_values, dotprod_add};

INLINE TARGET void multiply_dotprod(const Prepared *input, const Strip *strip, int bits, int rows,
                                    Words (*sums)[VECTORS]) {
    multiply_words(input, strip, dotprod_product, bits, rows, sums);
}

INLINE TARGET void run_dotprod(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_place(weight, input, place, multiply_dotprod, add_q8, bits);
}

RUN_KERNEL(dotprod, 2) RUN_KERNEL(dotprod, 4) RUN_KERNEL(dotprod, 8)

const KernelKind neon_dotprod_q8 = {.most_rows = MOST_ROWS, .run = {run_dotprod_2, run_dotprod_4, run_dotprod_8}};

#endif
