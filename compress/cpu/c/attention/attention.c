#include "attention/attention.h"

#include <math.h>
#include <stdlib.h>

#include "attention/part.h"
#include "common/thread_pool.h"

enum { TILES_PER_THREAD = 4 }; /* with fewer tiles than that, their parts are shared out, too */

typedef struct {
    const PagedAttention *attention;
    AttendPart attend;
    Tile *tiles;
    int64_t num_tiles, num_parts;
    PartResult *results; /* of all parts of all tiles; NULL when tiles go through their parts one after the other */
    float *values;       /* of these results */
    int64_t *owner;      /* the tile of each of these results */
} Plan;

static int64_t queries_per_head(const PagedAttention *attention) { return attention->heads / attention->pages->kv_heads; }

static int64_t first_seen(const PagedAttention *attention, int64_t position) {
    const int64_t first = attention->window && position >= attention->window ? position - attention->window + 1 : 0;
    const int64_t chunk = attention->chunk ? position / attention->chunk * attention->chunk : 0;
    return chunk > first ? chunk : first;
}

/* Ancestors of a token of a span, where it is in a tree of drafts. */
static uint64_t ancestors_of(const PagedAttention *attention, const Span *span, int64_t token) {
    return attention->ancestors ? attention->ancestors[span->first_row + token] : 0;
}

/* Position of a token among the keys, for windows and chunks. */
static int64_t position_of(const PagedAttention *attention, const Span *span, int64_t token) {
    const uint64_t ancestors = ancestors_of(attention, span, token);
    return span->first_position + (ancestors ? __builtin_popcountll(ancestors) - 1 : token);
}

/* Those ancestors that are in the token's own chunk. A bit is higher the deeper its ancestor is. */
static uint64_t seen_ancestors(const PagedAttention *attention, const Span *span, int64_t token) {
    uint64_t ancestors = ancestors_of(attention, span, token);
    if (!ancestors || !attention->chunk) return ancestors;
    const int64_t begin = position_of(attention, span, token) / attention->chunk * attention->chunk;
    for (int64_t key = span->first_position; key < begin; key++) ancestors &= ancestors - 1;
    return ancestors;
}

static void set_tile(const PagedAttention *attention, Tile *tile) {
    const int64_t shared = queries_per_head(attention), position = tile->span->first_position;
    const int64_t last = position + (tile->first_row + tile->rows - 1) / shared;
    int64_t first = first_seen(attention, position + tile->first_row / shared);
    for (int64_t row = tile->first_row; attention->ancestors && row < tile->first_row + tile->rows; row++) {
        const int64_t seen = first_seen(attention, position_of(attention, tile->span, row / shared));
        first = seen < first ? seen : first;
    }
    tile->first_part = first / PART;
    tile->num_parts = last / PART + 1 - tile->first_part;
}

static int64_t count_tiles(const PagedAttention *attention) {
    int64_t count = 0;
    for (int64_t i = 0; i < attention->num_spans; i++) {
        const int64_t rows = attention->spans[i].num_tokens * queries_per_head(attention);
        count += (rows + TILE - 1) / TILE * attention->pages->kv_heads;
    }
    return count;
}

/* Tiles of one head follow each other: they read the same keys. */
static void lay_out(Plan *plan) {
    const PagedAttention *attention = plan->attention;
    Tile *tile = plan->tiles;
    for (int64_t i = 0; i < attention->num_spans; i++) {
        const Span *span = &attention->spans[i];
        const int64_t rows = span->num_tokens * queries_per_head(attention);
        for (int64_t head = 0; head < attention->pages->kv_heads; head++)
            for (int64_t row = 0; row < rows; row += TILE, tile++) {
                *tile = (Tile){.span = span, .head = head, .first_row = row, .slot = plan->num_parts};
                tile->rows = rows - row < TILE ? rows - row : TILE;
                set_tile(attention, tile);
                plan->num_parts += tile->num_parts;
            }
    }
}

/* They lie far apart, where no processor expects them. */
static void fetch_scales(const KvPages *pages, const Strip *strip) {
    if (pages->key_bits != 16) {
        __builtin_prefetch(strip->key_scales);
        __builtin_prefetch(strip->key_scales + pages->block_size);
    }
    if (pages->value_bits != 16) {
        __builtin_prefetch(strip->value_scales);
        __builtin_prefetch(strip->value_scales + pages->block_size);
    }
}

/* The keys of a part that some row of the tile sees. */
static void set_strips(const Plan *plan, const Tile *tile, int64_t number, Part *part) {
    const PagedAttention *attention = plan->attention;
    const KvPages *pages = attention->pages;
    const int64_t begin = number * PART, last = part->last[tile->rows - 1];
    int64_t first = part->first[0];
    for (int row = 1; row < part->rows; row++) first = part->first[row] < first ? part->first[row] : first;
    int64_t key = first > begin ? first / STRIP * STRIP : begin;
    for (part->num_strips = 0; key < begin + PART && key <= last; key += STRIP) {
        const int64_t block = attention->blocks[tile->span->first_block + key / pages->block_size];
        const int64_t head = block * pages->kv_heads + tile->head, token = key % pages->block_size;
        const int64_t members = pages->value_bits == 16 ? 2 : 8; /* tokens per word of values */
        part->strips[part->num_strips] = (Strip){
            (const uint32_t *)(pages->keys + head * head_bytes(pages, pages->key_bits)) + token,
            (const uint32_t *)(pages->values + head * head_bytes(pages, pages->value_bits)) + token / members * pages->head_dim,
            pages->key_scales + head * 2 * pages->block_size + token,
            pages->value_scales + head * 2 * pages->block_size + token,
            key,
        };
        fetch_scales(pages, &part->strips[part->num_strips++]);
    }
}

void set_queries(const PagedAttention *attention, const Tile *tile, Part *part) {
    const int64_t shared = queries_per_head(attention), size = attention->pages->head_dim;
    part->attention = attention;
    part->rows = (int)tile->rows;
    part->first_of_span = tile->span->first_position;
    for (part->width = 1; part->width < part->rows;) part->width *= 2;
    for (int64_t row = 0; row < tile->rows; row++) {
        const int64_t token = (tile->first_row + row) / shared, head = tile->head * shared + (tile->first_row + row) % shared;
        const uint16_t *from = attention->query + (tile->span->first_row + token) * attention->query_row + head * size;
        memcpy(part->query[row], from, (size_t)size * sizeof *from);
        part->query_sum[row] = 0;
        for (int64_t d = 0; d < size; d++) part->query_sum[row] += float_of_bfloat16(from[d]);
        part->last[row] = tile->span->first_position + token;
        part->first[row] = first_seen(attention, position_of(attention, tile->span, token));
        part->ancestors[row] = seen_ancestors(attention, tile->span, token);
    }
    for (int row = part->rows; row < part->width; row++) {
        memset(part->query[row], 0, (size_t)size * sizeof *part->query[row]);
        part->query_sum[row] = 0;
        part->first[row] = 0, part->last[row] = -1, part->ancestors[row] = 0; /* sees nothing */
    }
}

void join(PartResult *into, const PartResult *from, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const float largest = fmaxf(into->largest[row], from->largest[row]);
        const float before = into->largest[row] <= UNSEEN ? 0 : expf(into->largest[row] - largest);
        const float share = from->largest[row] <= UNSEEN ? 0 : expf(from->largest[row] - largest);
        into->largest[row] = largest;
        into->sum[row] = into->sum[row] * before + from->sum[row] * share;
        for (int64_t d = row * size; d < (row + 1) * size; d++)
            into->values[d] = into->values[d] * before + from->values[d] * share;
    }
}

void clear(PartResult *result, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) result->largest[row] = UNSEEN, result->sum[row] = 0;
    memset(result->values, 0, (size_t)(rows * size) * sizeof *result->values);
}

void write_out(const PagedAttention *attention, const Tile *tile, const PartResult *result) {
    const int64_t shared = queries_per_head(attention), size = attention->pages->head_dim;
    for (int64_t row = 0; row < tile->rows; row++) {
        const int64_t token = (tile->first_row + row) / shared, head = tile->head * shared + (tile->first_row + row) % shared;
        uint16_t *to = attention->out + ((tile->span->first_row + token) * attention->heads + head) * size;
        const float *sink = attention->sink_logits;
        const float share = 1.0f / (result->sum[row] + (sink ? expf(sink[head] - result->largest[row]) : 0));
        for (int64_t d = 0; d < size; d++) to[d] = bfloat16_of(result->values[row * size + d] * share + 0.0f); /* no -0 */
    }
}

static void attend_tile(void *context, int64_t number) {
    const Plan *plan = context;
    const Tile *tile = &plan->tiles[number];
    const int64_t size = plan->attention->pages->head_dim;
    float values[2][TILE * LONGEST_HEAD];
    Part part;
    PartResult all = {.values = values[0]}, one = {.values = values[1]};
    set_queries(plan->attention, tile, &part);
    if (tile->num_parts == 1) { /* what joining with nothing gives */
        set_strips(plan, tile, tile->first_part, &part);
        plan->attend(&part, &one);
        write_out(plan->attention, tile, &one);
        return;
    }
    clear(&all, tile->rows, size);
    for (int64_t i = 0; i < tile->num_parts; i++) {
        set_strips(plan, tile, tile->first_part + i, &part);
        plan->attend(&part, &one);
        join(&all, &one, tile->rows, size);
    }
    write_out(plan->attention, tile, &all);
}

static void attend_one_part(void *context, int64_t number) {
    const Plan *plan = context;
    const Tile *tile = &plan->tiles[plan->owner[number]];
    Part part;
    set_queries(plan->attention, tile, &part);
    set_strips(plan, tile, tile->first_part + number - tile->slot, &part);
    plan->results[number].values = plan->values + number * TILE * plan->attention->pages->head_dim;
    plan->attend(&part, &plan->results[number]);
}

static void join_tile(void *context, int64_t number) {
    const Plan *plan = context;
    const Tile *tile = &plan->tiles[number];
    const int64_t size = plan->attention->pages->head_dim;
    float values[TILE * LONGEST_HEAD];
    PartResult all = {.values = values};
    clear(&all, tile->rows, size);
    for (int64_t i = 0; i < tile->num_parts; i++) join(&all, &plan->results[tile->slot + i], tile->rows, size);
    write_out(plan->attention, tile, &all);
}

static void attend_by_parts(Plan *plan) {
    for (int64_t tile = 0, part = 0; tile < plan->num_tiles; tile++)
        for (int64_t i = 0; i < plan->tiles[tile].num_parts; i++) plan->owner[part++] = tile;
    pool_run(attend_one_part, plan, plan->num_parts);
    pool_run(join_tile, plan, plan->num_tiles);
}

const AttendPart ATTEND_PART[NUM_INSTRUCTION_SETS] =
#if ON_X86
    {attend_part_scalar, attend_part_avx2, attend_part_avx512, attend_part_avx512_bf16};
#else
    BY_SET(attend_part);
#endif

int paged_attention(const PagedAttention *attention, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    Plan plan = {.attention = attention, .attend = ATTEND_PART[set], .num_tiles = count_tiles(attention)};
    plan.tiles = malloc((size_t)plan.num_tiles * sizeof *plan.tiles);
    if (!plan.tiles) return -1;
    lay_out(&plan);
    const int threads = pool_threads();
    if (threads > 1 && plan.num_tiles < threads * TILES_PER_THREAD && plan.num_parts > plan.num_tiles) {
        plan.results = malloc((size_t)plan.num_parts * sizeof *plan.results);
        plan.values = malloc((size_t)(plan.num_parts * TILE * attention->pages->head_dim) * sizeof *plan.values);
        plan.owner = malloc((size_t)plan.num_parts * sizeof *plan.owner);
    }
    if (plan.results && plan.values && plan.owner)
        attend_by_parts(&plan);
    else
        pool_run(attend_tile, &plan, plan.num_tiles);
    free(plan.owner);
    free(plan.values);
    free(plan.results);
    free(plan.tiles);
    return 0;
}
