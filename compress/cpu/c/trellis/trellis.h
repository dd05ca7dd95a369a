/* Products with a weight [O, I] of trellis codes (EXL3, after QTIP, https://arxiv.org/abs/2406.11235):
 *     y = H (T^T (H (x * in_scales))) * out_scales + bias,
 * where H multiplies every TURN numbers by a Hadamard matrix of 1 and -1, in the order of Sylvester's construction.
 *
 * Layout. A tile of T is 16 inputs by 16 outputs, one cyclic stream of 256 codes, from the highest bit of 32-bit words on. Two codes
 * have `pair_bits` bits, the first of them half of these, rounded down; odd ones are up to MOST_ODD_PAIR, of CODEBOOK_MUL1. The 8 tiles
 * of the same inputs and TURN outputs lie side by side, each cut into two halves, so that a step of the stream is the same for all
 * STREAMS halves:
 *     words [O / TURN][I / 16][2 * pair_bits][half][tile].
 * A number of T follows from the 16 bits that end with its code, its state, by the hash that the codebook names. Code 8 (4 q + t) + v
 * of a tile is that of input 2 t + v % 2 + 8 (v / 2 % 2) and output q + 8 (v / 4); the first half has q = 0 to 3, the second one 4 to 7.
 *
 * Numbers of T are exact, products and sums float32, each sum from the first input to the last; no sum depends on other rows
 * of x, on their number or on threads. x is bfloat16 or float32, and y has its type. O and I are multiples of TURN. */
#ifndef NATIVE_TRELLIS_H
#define NATIVE_TRELLIS_H

#include <stdint.h>

#include "common/dispatch.h"

enum { TURN = 128, STREAMS = 16, TRELLIS_SIDE = 16, MOST_TRELLIS_BITS = 8, MOST_ODD_PAIR = 9 };

typedef enum { CODEBOOK_3INST, CODEBOOK_MCG, CODEBOOK_MUL1 } TrellisCodebook;

typedef struct {
    int64_t out_features, in_features;
    int32_t pair_bits, codebook; /* 2 to 2 * MOST_TRELLIS_BITS; TrellisCodebook */
    const uint32_t *words;
    const float *in_scales, *out_scales; /* [I], [O] */
    const float *bias;                   /* [O] or NULL */
} TrellisWeight;

/* Returns 0, -1 when this machine lacks the instruction set, or -2 when out of memory. `type` is 0 for float32, 1 for bfloat16;
 * strides are elements from row to row. */
EXPORT int trellis_multiply(const TrellisWeight *weight, int type, int64_t rows, const void *x, int64_t x_stride, void *y,
                            int64_t y_stride, int instruction_set);

#endif
