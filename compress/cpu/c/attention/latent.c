#include "attention/latent.h"

#include <stdlib.h>

#include "attention/part.h"
#include "common/thread_pool.h"

enum {
    ROWS = 64,          /* that read each key once */
    TILES = ROWS / TILE,
    SEGMENT = 512,      /* keys whose results are joined as they come */
    AT_ONCE = 64,       /* keys that are laid out together */
    WAVE = 1 << 26,     /* bytes of results of segments at most, unless one of each row takes more */
};

typedef struct {
    const Span *span;
    int64_t first_row, rows, first_key, last_key;
    int64_t first_segment, num_segments;
} Chunk;

typedef struct {
    int64_t chunk, segment; /* the segment counts from the chunk's first one */
} Unit;

/* Keys of some rows, as the kernels of attention.h read them. */
typedef struct {
    uint32_t keys[AT_ONCE / STRIP][LONGEST_HEAD / 2 * STRIP] __attribute__((aligned(64)));
    uint32_t values[AT_ONCE / STRIP][STRIP / 2 * LONGEST_HEAD] __attribute__((aligned(64)));
} Laid;

typedef struct {
    const LatentAttention *latent;
    PagedAttention attention;
    KvPages pages; /* of what is laid out */
    AttendPart attend;
    void (*lay_out)(const LatentAttention *latent, const float *floats, const Span *span, int64_t first, int64_t last, Laid *laid);
    float floats[256]; /* numbers of 8-bit floats */
    Chunk *chunks;
    int64_t num_chunks, num_segments, per_wave;
    Unit *units;
    PartResult *results, *totals; /* [chunks, per_wave, TILES] and [chunks, TILES] */
    float *values;
} Plan;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* E4M3 without infinities. */
static float float_of_fp8(int code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    float x = exponent ? (float)(8 + fraction) : (float)fraction;
    for (int i = exponent ? exponent : 1; i < 10; i++) x *= 0.5f;
    for (int i = 10; i < exponent; i++) x *= 2.0f;
    return (code & 127) == 127 ? float_of_bits(0x7fc00000) : code & 128 ? -x : x;
}

/* Bfloat16 numbers of one token. */
INLINE void read_token(const LatentPart *part, const float *floats, int64_t slot, uint16_t *to) {
    const int64_t size = part->size;
    if (part->format == LATENT_EXACT) {
        memcpy(to, part->codes + slot * size * 2, (size_t)size * 2);
        return;
    }
    if (part->format == LATENT_FP8) {
        const uint8_t *codes = part->codes + slot * size;
        const float scale = float_of_float16(part->scales[slot]);
        for (int64_t d = 0; d < size; d++) to[d] = bfloat16_of(floats[codes[d]] * scale);
        return;
    }
    const float scale = float_of_float16(part->scales[2 * slot]), offset = float_of_float16(part->scales[2 * slot + 1]);
    const int64_t bytes = part->format == LATENT_INT4 ? size / 2 : size;
    const uint8_t *codes = part->codes + slot * bytes;
    const int mask = part->format == LATENT_INT4 ? 15 : 255;
    for (int64_t d = 0; d < bytes; d++) to[d] = bfloat16_of((float)(codes[d] & mask) * scale + offset);
    for (int64_t d = bytes; d < size; d++) to[d] = bfloat16_of((float)(codes[d - bytes] >> 4) * scale + offset);
}

/* Lays out tokens from `first` on, up to `last` and at most AT_ONCE; zeros behind them. */
INLINE void lay_out(const LatentAttention *latent, const float *floats, const Span *span, int64_t first, int64_t last, Laid *laid) {
    const int64_t width = latent->width, used = latent->latents.size + latent->keys.size;
    uint16_t rows[STRIP][LONGEST_HEAD];
    for (int64_t strip = 0; strip < AT_ONCE / STRIP && first + strip * STRIP <= last; strip++) {
        for (int64_t token = 0; token < STRIP; token++) {
            const int64_t key = first + strip * STRIP + token;
            if (key > last) {
                memset(rows[token], 0, (size_t)width * 2);
                continue;
            }
            const int64_t block = latent->attention.blocks[span->first_block + key / latent->block_size];
            const int64_t slot = block * latent->block_size + key % latent->block_size;
            read_token(&latent->latents, floats, slot, rows[token]);
            read_token(&latent->keys, floats, slot, rows[token] + latent->latents.size);
            memset(rows[token] + used, 0, (size_t)(width - used) * 2);
        }
        uint32_t *keys = laid->keys[strip], *values = laid->values[strip];
        for (int64_t d = 0; d < width; d += 2)
            for (int64_t token = 0; token < STRIP; token++) memcpy(keys++, rows[token] + d, 4);
        for (int64_t token = 0; token < STRIP; token += 2)
            for (int64_t d = 0; d < width; d++) *values++ = rows[token][d] | (uint32_t)rows[token + 1][d] << 16;
    }
}

static void lay_out_scalar(const LatentAttention *latent, const float *floats, const Span *span, int64_t first, int64_t last, Laid *laid) {
    lay_out(latent, floats, span, first, last, laid);
}
#if ON_X86
FOR_AVX2 static void lay_out_avx2(const LatentAttention *latent, const float *floats, const Span *span, int64_t first, int64_t last, Laid *laid) {
    lay_out(latent, floats, span, first, last, laid);
}
FOR_AVX512 static void lay_out_avx512(const LatentAttention *latent, const float *floats, const Span *span, int64_t first, int64_t last, Laid *laid) {
    lay_out(latent, floats, span, first, last, laid);
}
#endif

/* Rows of a chunk, tile by tile; their number. */
static int64_t cut_tiles(const Chunk *chunk, Tile *tiles) {
    int64_t count = 0;
    for (int64_t row = 0; row < chunk->rows; row += TILE)
        tiles[count++] = (Tile){.span = chunk->span, .first_row = chunk->first_row + row, .rows = smaller(TILE, chunk->rows - row)};
    return count;
}

static void attend_unit(void *context, int64_t number) {
    const Plan *plan = context;
    const Unit unit = plan->units[number];
    const Chunk *chunk = &plan->chunks[unit.chunk];
    const int64_t width = plan->latent->width, begin = (chunk->first_segment + unit.segment) * SEGMENT;
    PartResult *results = &plan->results[(unit.chunk * plan->per_wave + unit.segment % plan->per_wave) * TILES];
    Tile tiles[TILES];
    Part parts[TILES];
    Laid laid;
    const int64_t num_tiles = cut_tiles(chunk, tiles);
    for (int64_t i = 0; i < num_tiles; i++) {
        clear(&results[i], TILE, width);
        set_queries(&plan->attention, &tiles[i], &parts[i]);
    }
    for (int64_t key = begin; key < begin + SEGMENT && key <= chunk->last_key; key += AT_ONCE) {
        if (key + AT_ONCE <= chunk->first_key) continue;
        plan->lay_out(plan->latent, plan->floats, chunk->span, key, chunk->last_key, &laid);
        for (int64_t i = 0; i < num_tiles; i++) {
            Part *part = &parts[i];
            Strip strips[STRIPS];
            part->strips = strips;
            for (part->num_strips = 0; part->num_strips * STRIP < AT_ONCE; part->num_strips++) {
                const int64_t strip = part->num_strips, first = key + strip * STRIP;
                if (first > chunk->last_key) break;
                strips[strip] = (Strip){laid.keys[strip], laid.values[strip], NULL, NULL, first};
            }
            plan->attend(part, &results[i]);
        }
    }
}

static void join_chunk(void *context, int64_t number) {
    const Plan *plan = context;
    Tile tiles[TILES];
    const int64_t num_tiles = cut_tiles(&plan->chunks[number], tiles);
    for (int64_t segment = 0; segment < plan->per_wave; segment++)
        for (int64_t i = 0; i < num_tiles; i++) {
            const PartResult *result = &plan->results[(number * plan->per_wave + segment) * TILES + i];
            if (result->sum[0] < 0) continue;
            join(&plan->totals[number * TILES + i], result, tiles[i].rows, plan->latent->width);
        }
}

static void write_chunk(void *context, int64_t number) {
    const Plan *plan = context;
    Tile tiles[TILES];
    const int64_t num_tiles = cut_tiles(&plan->chunks[number], tiles);
    for (int64_t i = 0; i < num_tiles; i++) write_out(&plan->attention, &tiles[i], &plan->totals[number * TILES + i]);
}

static int64_t count_chunks(const PagedAttention *attention) {
    int64_t count = 0;
    for (int64_t i = 0; i < attention->num_spans; i++)
        count += (attention->spans[i].num_tokens * attention->heads + ROWS - 1) / ROWS;
    return count;
}

/* With a tree of drafts, a token's window may begin further ahead than its place among the keys says. */
static void set_keys(const PagedAttention *attention, Chunk *chunk) {
    const int64_t tree = attention->ancestors ? chunk->span->num_tokens : 0;
    const int64_t position = chunk->span->first_position + chunk->first_row / attention->heads - tree;
    chunk->first_key = attention->window && position >= attention->window ? position - attention->window + 1 : 0;
    chunk->last_key = chunk->span->first_position + (chunk->first_row + chunk->rows - 1) / attention->heads;
    chunk->first_segment = chunk->first_key / SEGMENT;
    chunk->num_segments = chunk->last_key / SEGMENT + 1 - chunk->first_segment;
}

static void cut_chunks(Plan *plan) {
    const PagedAttention *attention = &plan->attention;
    Chunk *chunk = plan->chunks;
    for (int64_t i = 0; i < attention->num_spans; i++) {
        const int64_t rows = attention->spans[i].num_tokens * attention->heads;
        for (int64_t row = 0; row < rows; row += ROWS, chunk++) {
            *chunk = (Chunk){.span = &attention->spans[i], .first_row = row, .rows = smaller(ROWS, rows - row)};
            set_keys(attention, chunk);
            if (chunk->num_segments > plan->num_segments) plan->num_segments = chunk->num_segments;
        }
    }
}

static int allocate(Plan *plan) {
    const int64_t width = plan->latent->width, chunk_bytes = plan->num_chunks * ROWS * width * (int64_t)sizeof(float);
    const int64_t most = smaller(plan->num_segments, WAVE / chunk_bytes);
    plan->per_wave = most > 1 ? most : 1;
    const int64_t count = plan->num_chunks * (plan->per_wave + 1);
    plan->results = malloc((size_t)(count * TILES) * sizeof *plan->results);
    plan->values = malloc((size_t)(count * ROWS * width) * sizeof *plan->values);
    plan->units = malloc((size_t)(plan->num_chunks * plan->per_wave) * sizeof *plan->units);
    if (!plan->results || !plan->values || !plan->units) return -1;
    plan->totals = plan->results + plan->num_chunks * plan->per_wave * TILES;
    for (int64_t i = 0; i < count * TILES; i++) plan->results[i].values = plan->values + i * TILE * width;
    for (int64_t i = 0; i < plan->num_chunks * TILES; i++) clear(&plan->totals[i], TILE, width);
    return 0;
}

/* Some segments of all chunks; results of what is not computed have a sum below zero. */
static void run_wave(Plan *plan, int64_t first) {
    int64_t count = 0;
    for (int64_t i = 0; i < plan->num_chunks * plan->per_wave * TILES; i++) plan->results[i].sum[0] = -1;
    for (int64_t chunk = 0; chunk < plan->num_chunks; chunk++)
        for (int64_t segment = first; segment < smaller(first + plan->per_wave, plan->chunks[chunk].num_segments); segment++)
            plan->units[count++] = (Unit){chunk, segment};
    pool_run(attend_unit, plan, count);
    pool_run(join_chunk, plan, plan->num_chunks);
}

int latent_attention(const LatentAttention *latent, int instruction_set) {
    static void (*const LAY_OUT[NUM_INSTRUCTION_SETS])(const LatentAttention *, const float *, const Span *, int64_t, int64_t,
                                                       Laid *) = BY_SET(lay_out);
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    Plan plan = {.latent = latent, .attention = latent->attention, .attend = ATTEND_PART[set], .lay_out = LAY_OUT[set]};
    plan.pages = (KvPages){.kv_heads = 1, .head_dim = latent->width, .block_size = STRIP, .key_bits = 16, .value_bits = 16};
    plan.attention.pages = &plan.pages;
    plan.attention.chunk = 0, plan.attention.softcap = 0, plan.attention.sink_logits = NULL;
    for (int code = 0; code < 256; code++) plan.floats[code] = float_of_fp8(code);
    plan.num_chunks = count_chunks(&plan.attention);
    plan.chunks = malloc((size_t)plan.num_chunks * sizeof *plan.chunks);
    int status = -1;
    if (plan.chunks) {
        cut_chunks(&plan);
        status = allocate(&plan);
        for (int64_t first = 0; !status && first < plan.num_segments; first += plan.per_wave) run_wave(&plan, first);
        if (!status) pool_run(write_chunk, &plan, plan.num_chunks);
    }
    free(plan.units);
    free(plan.values);
    free(plan.results);
    free(plan.chunks);
    return status;
}
