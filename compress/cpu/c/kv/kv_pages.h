/* Keys and values of one layer in blocks of tokens, laid out for products with sixteen tokens or sixteen dimensions at
 * once. A block holds, head after head,
 *
 *   keys, 16 bits     [D / 2][tokens][2] bfloat16: a 32-bit word is two dimensions of one token
 *   values, 16 bits   [tokens / 2][D][2] bfloat16: a word is two tokens of one dimension
 *   keys, 32 bits     [D][tokens] float32
 *   values, 32 bits   [tokens][D] float32
 *   keys, 4 bits      [D / 8][tokens] words: eight dimensions of one token
 *   values, 4 bits    [tokens / 8][D] words: eight tokens of one dimension
 *   8 bits            two such planes of 4 bits, low halves of the codes before high halves
 *   scales            [2][tokens] float16: scale and offset; x ~ code * scale + offset
 *
 * Member j of a word of eight stands in bits 16 (j % 2) + 4 (j / 2): shifting the word by 0, 4, 8 and 12 bits brings
 * neighbours j, j + 1 to the bottom of its two halves. A block of zero bytes reads as zeros.
 */
#ifndef NATIVE_KV_PAGES_H
#define NATIVE_KV_PAGES_H

#include <stdint.h>

#include "common/dispatch.h"

enum {
    STRIP = 16,         /* tokens that stand side by side; divides the tokens of a block */
    LONGEST_HEAD = 640, /* numbers of a head at most: a latent of 512 channels and a rotated key of up to 128 */
};

typedef struct {
    int64_t kv_heads, head_dim; /* head_dim: a multiple of 32, at most LONGEST_HEAD */
    int64_t block_size;         /* tokens: 16, 32, 64, 128 or 256 */
    int64_t key_bits, value_bits; /* 32, 16, 8 or 4 */
    uint8_t *keys, *values;       /* of block 0 */
    uint16_t *key_scales, *value_scales;
} KvPages;

/* Bytes of one head of one block, which is the same for keys and values. */
static inline int64_t head_bytes(const KvPages *pages, int64_t bits) {
    return pages->block_size * pages->head_dim * bits / 8;
}

static inline int word_bit(int64_t member) { return (int)(16 * (member % 2) + 4 * (member / 2)); }

/* Additions of a step to the pages of one layer: heads of its tokens, side by side; rows are strides in elements.
 * Heads of queries and keys are normed, rotated by position and Hadamard-rotated in one pass, each where it is asked for;
 * queries stay where they are, keys and values go to their slots, quantized if the pages are, as
 * compress/checkpoint/kv_quant.py says. Numbers are rounded to bfloat16 where norm_rope_act.h rounds them. */
typedef struct {
    const KvPages *pages;
    int64_t rows, heads;         /* of queries; no heads: no queries to change */
    const int64_t *slots;        /* [rows]: block * block_size + offset. They differ; those that share a word are neighbours */
    void *query;                 /* [rows, heads, head_dim], changed in place */
    const void *key, *value;     /* [rows, kv_heads, head_dim] */
    int64_t query_row, key_row, value_row;
    const uint16_t *norm;        /* [heads + kv_heads, head_dim] of an RMSNorm over each head, or NULL for none */
    float eps;
    const uint16_t *cos, *sin;   /* [rows, head_dim], as in Rotate; NULL: heads are rotated already */
    int32_t hadamard;            /* times an orthonormal Hadamard matrix, after all that */
    int32_t wide;                /* heads are float32, not bfloat16, and come without norm, cos and sin */
} KvStep;

/* 0, or -1 for an instruction set that this machine lacks. */
EXPORT int kv_store(const KvStep *step, int instruction_set);

#endif
