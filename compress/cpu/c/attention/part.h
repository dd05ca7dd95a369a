/* Work that attention.c plans and its compiled-for-one-instruction-set halves compute: one tile over one part of its keys. */
#ifndef NATIVE_ATTENTION_PART_H
#define NATIVE_ATTENTION_PART_H

#include <math.h>

#include "attention/attention.h"
#include "common/bf16.h"

enum { PART = 256, TILE = 8, STRIPS = PART / STRIP };

/* Sixteen tokens of one head of one block. */
typedef struct {
    const uint32_t *keys, *values;              /* first words of the strip */
    const uint16_t *key_scales, *value_scales;  /* offsets stand block_size further on */
    int64_t first_key;                          /* position of its first token */
} Strip;

typedef struct {
    const PagedAttention *attention;
    int rows, width;                            /* rows, and rows that are computed: 1, 2, 4 or 8; the rest are zeros */
    float query[TILE][LONGEST_HEAD];
    float query_sum[TILE];
    int64_t first[TILE], last[TILE];            /* keys that a row sees, `last` included */
    int64_t first_of_span;                      /* key of the span's first token */
    uint64_t ancestors[TILE];                   /* as in PagedAttention: of the keys from there on, those that a row sees */
    int64_t num_strips, num_next;
    const Strip *strips, *next;                 /* those that are read, and others that are worth fetching meanwhile */
} Part;

/* State of each row over the parts so far: the largest score, the sum of exp(score - largest), and that of the values so
 * weighted. */
typedef struct {
    float largest[TILE], sum[TILE];
    float *values; /* [TILE, head_dim] */
} PartResult;

/* Rows of one span and one key-value head. */
typedef struct {
    const Span *span;
    int64_t head, first_row, rows; /* counted over the tokens of the span and the query heads of `head` */
    int64_t first_part, end_part;  /* of its keys */
} Tile;

/* Everything of a part but its strips. */
void set_queries(const PagedAttention *attention, const Tile *tile, Part *part);

/* A result of no keys; what other keys gave, joined to it; and the output of a tile. */
void clear(PartResult *result, int64_t rows, int64_t size);
void join(PartResult *into, const PartResult *from, int64_t rows, int64_t size);
void write_out(const PagedAttention *attention, const Tile *tile, const PartResult *result);

/* Joins the keys of a part to a result. */
typedef void (*AttendPart)(const Part *part, PartResult *result);
extern const AttendPart ATTEND_PART[NUM_INSTRUCTION_SETS];

void attend_part_scalar(const Part *part, PartResult *result);
void attend_part_avx2(const Part *part, PartResult *result);
void attend_part_avx512(const Part *part, PartResult *result);
void attend_part_avx512_bf16(const Part *part, PartResult *result);

/* Stands for the score of a key that is not seen. Finite, so that the difference of two of them is a number. */
static const float UNSEEN = -3e38f;

/* Into the second cache: misses of the first one are few at a time. */
INLINE void fetch(const void *from) { __builtin_prefetch(from, 0, 2); }

/* `count` strips of the next part, or NULL. */
INLINE const Strip *next_strips(const Part *part, int64_t first, int64_t count) {
    return first + count <= part->num_next ? &part->next[first] : NULL;
}

/* Scales of a strip. They lie far apart: fetched for a whole part at once, they would hold up everything behind them. */
INLINE void fetch_scales(const KvPages *pages, const Strip *strip) {
    for (int64_t i = 0; i < 2 * pages->block_size; i += pages->block_size < 32 ? 32 : pages->block_size) {
        if (pages->key_bits < 16) fetch(strip->key_scales + i);
        if (pages->value_bits < 16) fetch(strip->value_scales + i);
    }
}

INLINE float largest_lane(Lanes x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

/* All bits set where the strip's token is before the span, or an ancestor of the row. */
INLINE IntLanes on_branch(const Part *part, int row, const Strip *strip) {
    IntLanes found;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t member = strip->first_key + lane - part->first_of_span;
        found[lane] = member < 0 || (member < 64 && part->ancestors[row] >> member & 1) ? -1 : 0;
    }
    return found;
}

/* All bits set where a row sees the strip's token. */
INLINE IntLanes visible(const Part *part, int row, const Strip *strip) {
    const IntLanes place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t first = part->first[row] - strip->first_key, last = part->last[row] - strip->first_key;
    const int32_t low = first < 0 ? 0 : first > STRIP ? STRIP : (int32_t)first;
    const int32_t high = last < -1 ? -1 : last > STRIP ? STRIP : (int32_t)last;
    const IntLanes seen = ~lanes_negative((place - low) | (high - place));
    return part->ancestors[row] ? seen & on_branch(part, row, strip) : seen;
}

/* x ~ centred code * scale + middle, for sixteen tokens. Codes are taken from the middle of their range, which keeps
 * products small. Without codes scale is 1 and middle 0. */
typedef struct {
    Lanes scale, middle;
} Grid;

INLINE Grid load_grid(const uint16_t *scales, int64_t block_size, int64_t bits) {
    if (bits >= 16) return (Grid){lanes_of(1.0f), lanes_of(0.0f)};
    Lanes scale = lanes_load_float16(scales), offset = lanes_load_float16(scales + block_size);
    return (Grid){scale, offset + scale * lanes_of(bits == 8 ? 128.0f : 8.0f)};
}

/* Bounds scores smoothly: tanh |x| is (1 - e^-2|x|) / (1 + e^-2|x|). */
INLINE Lanes soft_cap(Lanes scores, float cap) {
    const IntLanes sign = (IntLanes)scores & INT32_MIN;
    const Lanes size = (Lanes)((IntLanes)scores ^ sign), fading = lanes_exp(size * lanes_of(-2.0f / cap));
    const Lanes bounded = (lanes_of(1.0f) - fading) / (lanes_of(1.0f) + fading) * lanes_of(cap);
    return (Lanes)((IntLanes)bounded | sign);
}

/* Scores from the products of a row's query with sixteen keys, or with their centred codes; `all`: it sees each of them. */
INLINE Lanes to_scores(const Part *part, int row, const Strip *strip, Lanes products, Grid keys, int all) {
    products = products * keys.scale + keys.middle * lanes_of(part->query_sum[row]);
    products *= lanes_of(part->attention->scale);
    if (part->attention->softcap != 0) products = soft_cap(products, part->attention->softcap);
    return all ? products : lanes_select(visible(part, row, strip), products, lanes_of(UNSEEN));
}

/* Whether every row sees every key. */
INLINE int sees_all(const Part *part) {
    const int64_t first = part->strips[0].first_key, last = part->strips[part->num_strips - 1].first_key + STRIP - 1;
    for (int row = 0; row < part->rows; row++)
        if (part->first[row] > first || part->last[row] < last || part->ancestors[row]) return 0;
    return 1;
}

/* Takes the largest score of a part into a row's state; what is left of its sums is returned. */
INLINE float raise_largest(PartResult *result, int row, float largest) {
    const float before = result->largest[row];
    if (largest < before) return 1.0f;
    result->largest[row] = largest;
    return before <= UNSEEN ? 0 : expf(before - largest);
}

#endif
