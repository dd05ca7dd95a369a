/* Attention over pages (kv_pages.h) of spans of neighbouring tokens: decoding (one token), drafts, stretches of prompts.
 *
 * A row is one query head of one token. Rows of a span that share a key-value head are taken up to eight at a time, a
 * tile, over stretches of PART keys that begin at multiples of PART; a part gives the largest score, the sum of weights
 * and the weighted sum of values, and parts are joined in order. What a row gets depends on its own keys and on nothing
 * else: not on its tile, its span, other sequences or the number of threads. All sums are float32; where bfloat16
 * numbers are multiplied in pairs (AVX512_BF16), weights are rounded to bfloat16 before they meet the values; not where
 * queries are float32.
 */
#ifndef NATIVE_ATTENTION_H
#define NATIVE_ATTENTION_H

#include "kv/kv_pages.h"

typedef struct {
    int64_t first_row, num_tokens; /* rows of the token axis */
    int64_t first_block;           /* in the table */
    int64_t first_position;        /* of its first token among the keys in the blocks; it sees keys up to its own */
} Span;

typedef struct {
    const KvPages *pages;
    int64_t heads;          /* a multiple of pages->kv_heads */
    int64_t window;         /* last keys that a token sees, itself included; 0: all */
    float scale;            /* of scores */
    const void *query;      /* bfloat16 or float32 [T, heads, head_dim], tokens query_row elements apart */
    int64_t query_row;
    void *out;              /* alike [T, heads, head_dim] */
    int64_t num_spans;
    const Span *spans;
    const int64_t *blocks;  /* the spans' tables of blocks */
    const uint64_t *ancestors; /* [T], or NULL. Of a token in a tree of drafts: bit k says whether it sees the k-th token of
                                  its span; its position is then the first one's and as many as it sees before it. 0: it
                                  sees all up to its own */
    const float *sink_logits; /* [heads], or NULL: a score of each head that counts in the sum of weights, of no key */
    int64_t chunk;          /* tokens that stand in one chunk, of which each sees no other; 0: all stand in one */
    float softcap;          /* scores s become softcap * tanh(s / softcap); 0: they are left */
    int32_t wide;           /* query and out are float32, and so are all products */
} PagedAttention;

/* 0, or -1 for an instruction set that this machine lacks. */
EXPORT int paged_attention(const PagedAttention *attention, int instruction_set);

#endif
