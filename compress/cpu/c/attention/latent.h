/* Absorbed latent attention (arXiv:2405.04434, section 2.1) over pages in the layout of plain torch: all query heads look
 * at one key, a latent and a rotated key side by side, and sum up latents.
 *
 * Rows are as in attention.h, up to 64 of a span at a time. Each block of keys is dequantized to bfloat16 and laid out as
 * kv_pages.h says, once for these rows; results of stretches of 512 keys are joined in order. What a row gets depends on
 * its own keys and on nothing else.
 */
#ifndef NATIVE_LATENT_H
#define NATIVE_LATENT_H

#include "attention/attention.h"

enum { LATENT_EXACT, LATENT_INT8, LATENT_FP8, LATENT_INT4 };

/* Latents, or rotated keys, of one layer: [blocks, block_size, size] bfloat16, or codes of a byte, or of half of one
 * (dimension d in the low half of byte d, d + size / 2 in its high half), with float16 scales [blocks, block_size, 1], or
 * 2 with an offset: x ~ code * scale + offset. */
typedef struct {
    int64_t size, format;
    const uint8_t *codes;
    const uint16_t *scales;
} LatentPart;

typedef struct {
    PagedAttention attention; /* of queries [T, heads, width]: a latent, a rotated key, zeros; pages, chunk, softcap and sink
                                 logits are not read; out [T, heads, width] has latents first */
    int64_t width;            /* a multiple of 32, at most LONGEST_HEAD */
    int64_t block_size;
    LatentPart latents, keys;
} LatentAttention;

/* 0, or -1 for an instruction set that this machine lacks, or without memory. */
EXPORT int latent_attention(const LatentAttention *attention, int instruction_set);

#endif
