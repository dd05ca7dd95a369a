/* Products with a weight [O, I] of packed codes or of bfloat16 numbers: y = x W^T + bias.
 *
 * Layout. TILE output features lie together. A 32-bit word holds 32 / bits codes of one feature, neighbours in I; the
 * TILE words of a tile for the same inputs stand side by side, and such steps follow each other:
 *     words [O / TILE][I * bits / 32][TILE], little-endian.
 * Width SPARSE is 2:4 sparsity of codes of 4 bits: of every four neighbouring inputs two codes are kept, and places 0 to 3
 * of them, in their order. 32 inputs of a feature take three such words: two of eight codes each, then one of 16 places, all
 * from the lowest bit up. What is not kept is 0; there are no zeros, and table[8] is 0. Activations are float.
 * In words of the other widths the even inputs are in the low half and the odd ones in the high half, both from the lowest bit up, so
 * that (word >> bits * j) has a pair of neighbours, 2 j and 2 j + 1, at the bottom of its two halves.
 *     scales [O / TILE][I / group][TILE], zeros likewise as bytes.
 *     where tiles share scales: float32 scales [O / TILE][I / group], without steps and minima.
 *     with steps: scales [O / TILE][I / block][TILE], steps [O / TILE][I / group][TILE]; minima and minimum_steps likewise
 * O is padded to whole tiles (any codes, finite scales); I and group are multiples of INPUT_MULTIPLE, except that groups may be
 * SMALL_GROUP where activations are float and the width is not SPARSE. Steps, minima and e4m3 are for float activations alone.
 *
 * Numbers. W = (table[code] - (zero - center)) * scale with center = 2^(bits - 1); without zeros, table[code] * scale.
 * With minima, W = table[code] * scale - minimum. With steps, a group's scale is scale * step, its minimum minimum * minimum_step.
 * Bytes stand for code - 128, or are floats (e4m3) or places in a table where the weight says so. Sums run in float32, from the first input to the last within a run of
 * at most LONGEST_RUN inputs, and over runs; no sum depends on other rows of x, on their number or on threads.
 * With 8-bit and 4-bit activations sums within a group are exact int32.
 *
 * Activations are bfloat16 or float32, and y has their type. bfloat16 pairs are multiplied as they are where AVX-512 or matrix
 * tiles do so and bfloat16 holds the table; elsewhere, and for float32, products are float32. */
#ifndef NATIVE_LINEAR_H
#define NATIVE_LINEAR_H

#include <stdint.h>

#include "common/dispatch.h"

enum { TILE = 64, INPUT_MULTIPLE = 32, SMALL_GROUP = 16, LONGEST_RUN = 128, SPARSE = 3 /* bits per weight */ };

typedef enum { FLOAT32, BFLOAT16, FLOAT16, E8M0 /* of scales: 2^(byte - 127), 0 for byte 0 */ } NumberType;

typedef enum {
    ACTIVATIONS_FLOAT,      /* as they come */
    ACTIVATIONS_INT8_GROUP, /* 8 bits, a scale per row and run of inputs */
    ACTIVATIONS_INT8_ROW,   /* 8 bits, a scale per row */
    ACTIVATIONS_INT4_ROW    /* 4 bits, a scale per row, multiplied as those of 8 bits */
} Activations;

typedef struct {
    int64_t out_features, in_features, group;
    int32_t bits; /* 2, 4 or 8 of a code, SPARSE; 16 for bfloat16 numbers, which have neither scales nor zeros */
    int32_t scale_type;
    int32_t is_e4m3;       /* codes of 8 bits are e4m3 floats, none of them NaN; there are neither zeros nor minima */
    int32_t shares_scales; /* one for all features of a tile */
    int32_t fewest_tile_rows; /* that matrix tiles multiply; fewer take vectors with the same bits; 0: no tiles at all */
    const uint32_t *words;
    const void *scales;
    const uint8_t *zeros; /* NULL: symmetric */
    const void *minima;   /* of scale_type; NULL: none, as where there are zeros */
    const int8_t *steps, *minimum_steps; /* NULL: none; the second are there with both others */
    int64_t block;        /* inputs that share a scale where there are steps, a multiple of group */
    const float *bias;    /* [O] or NULL */
    float table[16];      /* of codes of 2 or 4 bits */
    const float *values;  /* [256] of codes of 8 bits that are places in a table; NULL: they are not */
    int64_t hadamard;     /* order of an orthonormal Hadamard matrix, a power of two up to LONGEST_RUN that divides I, by which
                           * inputs are multiplied first, and rounded to their type; 0: none */
} LinearWeight;

enum { LINEAR_OK, LINEAR_NO_INSTRUCTIONS = -1, LINEAR_NO_MEMORY = -2 };

/* codes [O, I], each below 2^bits, to words; features beyond O get code 0. With SPARSE codes are below 16, and of every four
 * neighbours at most two are not 8. */
EXPORT void linear_pack(const uint8_t *codes, int64_t out_features, int64_t in_features, int bits, uint32_t *words);

/* bfloat16 [O, I] to words of pairs; features beyond O get 0. */
EXPORT void linear_pack_bfloat16(const uint16_t *numbers, int64_t out_features, int64_t in_features, uint32_t *words);

/* x [rows, I] with x_stride elements from row to row, to y [rows, O]. `activations` is one of Activations;
 * `instruction_set` as in dispatch.h. Returns LINEAR_OK or what went wrong. */
EXPORT int linear_multiply(const LinearWeight *weight, int activations, int type, int64_t rows, const void *x,
                           int64_t x_stride, void *y, int64_t y_stride, int instruction_set);

/* One of several products; rows of x and y follow each other. */
typedef struct {
    const LinearWeight *weight;
    int64_t activations, rows;
    const void *x;
    void *y;
} LinearJob;

/* Products that do not depend on each other, all shared by all threads, with the bits of linear_multiply. */
int linear_multiply_all(const LinearJob *jobs, int64_t num_jobs, int type, int instruction_set);

#endif
