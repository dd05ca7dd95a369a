/* Packed weights that make keys and values of all heads from latents (arXiv:2405.04434, section 2.1), multiplied from
 * either side: queries move into the space of latents by the rows of keys, and sums of latents become values. */
#ifndef NATIVE_LATENT_HEADS_H
#define NATIVE_LATENT_HEADS_H

#include <stdint.h>

#include "common/dispatch.h"

enum { LONGEST_LATENT = 512 };

typedef struct {
    int64_t heads, own, value_dim; /* of each head, rows of keys, then rows of values */
    int64_t rank, group;           /* columns: multiples of 32, and those that share a scale; at most LONGEST_LATENT */
    int64_t bits;                  /* 8, or 4: of 32 columns, the first 16 in the low halves of 16 bytes */
    const uint8_t *codes;          /* [heads, own + value_dim, rank * bits / 8] */
    const float *scales;           /* [heads, own + value_dim, rank / group]; x is (code - zero) * scale */
    const uint8_t *zeros;
} LatentHeads;

typedef struct {
    const LatentHeads *weights;
    int64_t rows;
    const uint16_t *from; /* bfloat16 [rows, heads, own] to absorb, or [rows, heads, rank] */
    int64_t from_row, from_head;
    uint16_t *to;         /* bfloat16 [rows, heads, rank], or values [rows, heads, value_dim] */
} LatentProduct;

/* 0, or -1 for an instruction set that this machine lacks. */
EXPORT int absorb_queries(const LatentProduct *product, int instruction_set);
EXPORT int latent_values(const LatentProduct *product, int instruction_set);

/* All numbers of `rows` heads as bfloat16 [rows, own + value_dim, rank], in `to`. */
EXPORT int unpack_latent_heads(const LatentProduct *product, int instruction_set);

#endif
