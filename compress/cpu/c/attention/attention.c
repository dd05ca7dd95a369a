#include "attention/attention.h"

#include <math.h>
#include <stdlib.h>

#include "attention/part.h"
#include "common/thread_pool.h"

enum {
    BAND = 8,             /* tiles that read each part one after the other */
    SEGMENT = 8,          /* parts whose results are joined as they come */
    BANDS_PER_THREAD = 4, /* with fewer bands than that, their segments are shared out, too */
};

/* Tiles of one span that follow each other: many of one head, or the few of several heads, which lie side by side in each
 * block. Read one head after the other, blocks are pieces too short for the memory to be fast. */
typedef struct {
    int64_t first_tile, num_tiles;
    int64_t first_segment, num_segments;
} Band;

typedef struct {
    const PagedAttention *attention;
    AttendPart attend;
    Tile *tiles;
    Band *bands;
    int64_t num_bands, num_units;
    int64_t *band_of;    /* of each unit, a segment of a band */
    int64_t *first_unit; /* of each band */
    PartResult *results; /* [num_units, BAND] */
    float *values;       /* of these results */
} Plan;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

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
    tile->end_part = last / PART + 1;
}

static int64_t tiles_of_head(const PagedAttention *attention, const Span *span) {
    return (span->num_tokens * queries_per_head(attention) + TILE - 1) / TILE;
}

static int64_t count_tiles(const PagedAttention *attention) {
    int64_t count = 0;
    for (int64_t i = 0; i < attention->num_spans; i++)
        count += tiles_of_head(attention, &attention->spans[i]) * attention->pages->kv_heads;
    return count;
}

/* Tiles of one head follow each other: they read the same keys. */
static Tile *cut_head(const PagedAttention *attention, const Span *span, int64_t head, Tile *tiles) {
    const int64_t rows = span->num_tokens * queries_per_head(attention);
    for (int64_t row = 0; row < rows; row += TILE, tiles++) {
        *tiles = (Tile){.span = span, .head = head, .first_row = row, .rows = rows - row < TILE ? rows - row : TILE};
        set_tile(attention, tiles);
    }
    return tiles;
}

static void cut_tiles(Plan *plan) {
    const PagedAttention *attention = plan->attention;
    Tile *tiles = plan->tiles;
    for (int64_t i = 0; i < attention->num_spans; i++)
        for (int64_t head = 0; head < attention->pages->kv_heads; head++)
            tiles = cut_head(attention, &attention->spans[i], head, tiles);
}

static void add_band(Plan *plan, int64_t first_tile, int64_t num_tiles) {
    const Tile *tiles = plan->tiles + first_tile;
    int64_t first = tiles->first_part, end = tiles->end_part;
    for (int64_t i = 1; i < num_tiles; i++) {
        first = tiles[i].first_part < first ? tiles[i].first_part : first;
        end = tiles[i].end_part > end ? tiles[i].end_part : end;
    }
    const int64_t segment = first / SEGMENT, num_segments = (end + SEGMENT - 1) / SEGMENT - segment;
    plan->bands[plan->num_bands++] = (Band){first_tile, num_tiles, segment, num_segments};
    plan->num_units += num_segments;
}

/* Bands of up to `together` heads, where one has room for all their tiles. */
static void cut_bands(Plan *plan, int64_t together) {
    const PagedAttention *attention = plan->attention;
    int64_t span_begin = 0;
    plan->num_bands = plan->num_units = 0;
    for (int64_t i = 0; i < attention->num_spans; i++) {
        const int64_t of_head = tiles_of_head(attention, &attention->spans[i]), heads = BAND / of_head;
        const int64_t of_group = of_head * (heads > 1 ? smaller(heads, together) : 1);
        const int64_t span_end = span_begin + of_head * attention->pages->kv_heads;
        for (int64_t group = span_begin; group < span_end; group += of_group)
            for (int64_t tile = group, end = smaller(group + of_group, span_end); tile < end; tile += BAND)
                add_band(plan, tile, smaller(BAND, end - tile));
        span_begin = span_end;
    }
}

/* As many heads together as leave enough for all threads to do: which they are changes no result. */
static void lay_out(Plan *plan) {
    const int threads = pool_threads();
    cut_tiles(plan);
    cut_bands(plan, 1);
    const int64_t together = threads > 1 ? plan->num_units / (threads * BANDS_PER_THREAD) : BAND;
    if (together > 1) cut_bands(plan, together);
}

/* The keys of a part that some row of the tile sees; their number. */
static int64_t find_strips(const Plan *plan, const Tile *tile, const Part *part, int64_t number, Strip *strips) {
    const PagedAttention *attention = plan->attention;
    const KvPages *pages = attention->pages;
    const int64_t begin = number * PART, last = part->last[tile->rows - 1];
    const int64_t members = pages->value_bits < 16 ? 8 : 32 / pages->value_bits; /* tokens per word of values */
    const int shift = __builtin_ctzll((unsigned long long)pages->block_size);
    int64_t first = part->first[0], count = 0;
    for (int row = 1; row < part->rows; row++) first = part->first[row] < first ? part->first[row] : first;
    for (int64_t key = first > begin ? first / STRIP * STRIP : begin; key < begin + PART && key <= last; key += STRIP) {
        const int64_t block = attention->blocks[tile->span->first_block + (key >> shift)];
        const int64_t head = block * pages->kv_heads + tile->head, token = key & (pages->block_size - 1);
        strips[count++] = (Strip){
            (const uint32_t *)(pages->keys + head * head_bytes(pages, pages->key_bits)) + token,
            (const uint32_t *)(pages->values + head * head_bytes(pages, pages->value_bits)) + token / members * pages->head_dim,
            pages->key_scales + head * 2 * pages->block_size + token,
            pages->value_scales + head * 2 * pages->block_size + token,
            key,
        };
    }
    return count;
}

static Lanes load_query(const PagedAttention *attention, int64_t place) {
    return attention->wide ? lanes_load((const float *)attention->query + place)
                           : lanes_load_bfloat16((const uint16_t *)attention->query + place);
}

static void store_out(const PagedAttention *attention, int64_t place, Lanes x) {
    if (attention->wide)
        lanes_store((float *)attention->out + place, x);
    else
        lanes_store_bfloat16((uint16_t *)attention->out + place, x);
}

void set_queries(const PagedAttention *attention, const Tile *tile, Part *part) {
    const int64_t shared = queries_per_head(attention), size = attention->pages->head_dim;
    part->attention = attention;
    part->rows = (int)tile->rows;
    part->first_of_span = tile->span->first_position;
    part->num_next = 0;
    for (part->width = 1; part->width < part->rows;) part->width *= 2;
    for (int64_t row = 0; row < tile->rows; row++) {
        const int64_t token = (tile->first_row + row) / shared, head = tile->head * shared + (tile->first_row + row) % shared;
        const int64_t from = (tile->span->first_row + token) * attention->query_row + head * size;
        Lanes sum = {0};
        for (int64_t d = 0; d < size; d += LANES) {
            const Lanes query = load_query(attention, from + d);
            lanes_store(part->query[row] + d, query);
            sum += query;
        }
        part->query_sum[row] = sum_of_lanes(sum);
        part->last[row] = tile->span->first_position + token;
        part->first[row] = first_seen(attention, position_of(attention, tile->span, token));
        part->ancestors[row] = seen_ancestors(attention, tile->span, token);
    }
    for (int row = part->rows; row < part->width; row++) {
        memset(part->query[row], 0, (size_t)size * sizeof part->query[row][0]);
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
        const int64_t to = ((tile->span->first_row + token) * attention->heads + head) * size;
        const float *sink = attention->sink_logits;
        const float share = 1.0f / (result->sum[row] + (sink ? expf(sink[head] - result->largest[row]) : 0));
        for (int64_t d = 0; d < size; d += LANES) /* no -0 */
            store_out(attention, to + d, lanes_load(result->values + row * size + d) * lanes_of(share) + lanes_of(0.0f));
    }
}

/* A tile of a band, and one of its parts. */
typedef struct {
    int64_t tile, number, num_strips;
    Strip strips[STRIPS];
} Stretch;

/* Goes on to what is computed next, from the tile and part that are set; 0 behind part `end`. */
static int find_stretch(const Plan *plan, const Band *band, const Part *parts, int64_t end, Stretch *stretch) {
    const Tile *tiles = plan->tiles + band->first_tile;
    for (; stretch->number < end; stretch->number++, stretch->tile = 0)
        for (; stretch->tile < band->num_tiles; stretch->tile++) {
            const Tile *tile = &tiles[stretch->tile];
            if (stretch->number < tile->first_part || stretch->number >= tile->end_part) continue;
            stretch->num_strips = find_strips(plan, tile, &parts[stretch->tile], stretch->number, stretch->strips);
            return 1;
        }
    stretch->num_strips = 0;
    return 0;
}

/* Joins a segment of a band to results, [BAND]. */
static void attend_segment(const Plan *plan, const Band *band, int64_t segment, PartResult *results) {
    const Tile *tiles = plan->tiles + band->first_tile;
    Part parts[BAND];
    Stretch stretches[2], *now = &stretches[0], *next = &stretches[1];
    for (int64_t i = 0; i < band->num_tiles; i++) set_queries(plan->attention, &tiles[i], &parts[i]);
    now->tile = 0, now->number = segment * SEGMENT;
    for (int more = find_stretch(plan, band, parts, (segment + 1) * SEGMENT, now); more;) {
        next->tile = now->tile + 1, next->number = now->number;
        more = find_stretch(plan, band, parts, (segment + 1) * SEGMENT, next);
        Part *part = &parts[now->tile];
        part->strips = now->strips, part->num_strips = now->num_strips;
        const int known = next->number == now->number && tiles[next->tile].head == tiles[now->tile].head;
        part->next = next->strips, part->num_next = known ? 0 : next->num_strips;
        plan->attend(part, &results[now->tile]);
        Stretch *done = now;
        now = next, next = done;
    }
}

static void prepare_results(PartResult *results, float *values, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i++) {
        results[i].values = values + i * TILE * size;
        clear(&results[i], TILE, size);
    }
}

static void join_all(const Plan *plan, const Band *band, PartResult *into, const PartResult *from) {
    for (int64_t i = 0; i < band->num_tiles; i++)
        join(&into[i], &from[i], plan->tiles[band->first_tile + i].rows, plan->attention->pages->head_dim);
}

static void write_band(const Plan *plan, const Band *band, const PartResult *results) {
    for (int64_t i = 0; i < band->num_tiles; i++)
        write_out(plan->attention, &plan->tiles[band->first_tile + i], &results[i]);
}

static void attend_band(void *context, int64_t number) {
    const Plan *plan = context;
    const Band *band = &plan->bands[number];
    const int64_t size = plan->attention->pages->head_dim;
    float values[2][BAND * TILE * LONGEST_HEAD];
    PartResult all[BAND], one[BAND];
    prepare_results(all, values[0], band->num_tiles, size);
    for (int64_t i = 0; i < band->num_segments; i++) {
        PartResult *results = i ? one : all; /* the first one is what joining it with nothing gives */
        if (i) prepare_results(one, values[1], band->num_tiles, size);
        attend_segment(plan, band, band->first_segment + i, results);
        if (i) join_all(plan, band, all, one);
    }
    write_band(plan, band, all);
}

static void attend_unit(void *context, int64_t number) {
    const Plan *plan = context;
    const int64_t size = plan->attention->pages->head_dim, owner = plan->band_of[number];
    const Band *band = &plan->bands[owner];
    PartResult *results = plan->results + number * BAND;
    prepare_results(results, plan->values + number * BAND * TILE * size, band->num_tiles, size);
    attend_segment(plan, band, band->first_segment + number - plan->first_unit[owner], results);
}

static void join_band(void *context, int64_t number) {
    const Plan *plan = context;
    const Band *band = &plan->bands[number];
    PartResult *results = plan->results + plan->first_unit[number] * BAND;
    for (int64_t i = 1; i < band->num_segments; i++) join_all(plan, band, results, results + i * BAND);
    write_band(plan, band, results);
}

/* Room for the results of all units; 0 without memory. */
static int make_room(Plan *plan) {
    const int64_t size = plan->attention->pages->head_dim;
    plan->results = malloc((size_t)(plan->num_units * BAND) * sizeof *plan->results);
    plan->values = malloc((size_t)(plan->num_units * BAND * TILE * size) * sizeof *plan->values);
    plan->band_of = malloc((size_t)plan->num_units * sizeof *plan->band_of);
    plan->first_unit = malloc((size_t)plan->num_bands * sizeof *plan->first_unit);
    return plan->results && plan->values && plan->band_of && plan->first_unit;
}

static void attend_by_segments(Plan *plan) {
    for (int64_t band = 0, unit = 0; band < plan->num_bands; band++) {
        plan->first_unit[band] = unit;
        for (int64_t i = 0; i < plan->bands[band].num_segments; i++) plan->band_of[unit++] = band;
    }
    pool_run(attend_unit, plan, plan->num_units);
    pool_run(join_band, plan, plan->num_bands);
}

const AttendPart ATTEND_PART[NUM_INSTRUCTION_SETS] =
#if ON_X86
    {attend_part_scalar,      attend_part_avx2,        attend_part_avx512,
     attend_part_avx512_bf16, attend_part_avx512_bf16, attend_part_scalar};
#else
    BY_SET(attend_part);
#endif

/* The same without products of bfloat16 numbers. */
static const AttendPart ATTEND_WIDE[NUM_INSTRUCTION_SETS] =
#if ON_X86
    {attend_part_scalar, attend_part_avx2, attend_part_avx512, attend_part_avx512, attend_part_avx512, attend_part_scalar};
#else
    BY_SET(attend_part);
#endif

int paged_attention(const PagedAttention *attention, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    Plan plan = {.attention = attention, .attend = attention->wide ? ATTEND_WIDE[set] : ATTEND_PART[set]};
    const int64_t num_tiles = count_tiles(attention);
    plan.tiles = malloc((size_t)num_tiles * sizeof *plan.tiles);
    plan.bands = malloc((size_t)num_tiles * sizeof *plan.bands);
    const int ready = plan.tiles && plan.bands, threads = pool_threads();
    if (ready) {
        lay_out(&plan);
        const int few = threads > 1 && plan.num_bands < threads * BANDS_PER_THREAD && plan.num_units > plan.num_bands;
        if (few && make_room(&plan))
            attend_by_segments(&plan);
        else
            pool_run(attend_band, &plan, plan.num_bands);
    }
    free(plan.first_unit);
    free(plan.band_of);
    free(plan.values);
    free(plan.results);
    free(plan.bands);
    free(plan.tiles);
    return ready ? 0 : -1;
}
