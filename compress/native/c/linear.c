#include <stdlib.h>

#include "linear_prepare.h"
#include "pool.h"

/* Rows that share one pass over the weights and one decoded run: their sums stay in the second cache. */
enum { ROWS_PER_CHUNK = 128, ROWS_PER_PREPARATION = 8, BLOCKS_WITHOUT_DECODING = 2 };
/* Rough speed of one core, from which chunks of some ten microseconds are cut. */
static const double CHUNK_NANOSECONDS = 40000, BYTES_PER_NANOSECOND = 15, PRODUCTS_PER_NANOSECOND = 150;

/* Without a kind for bfloat16 such activations are widened. */
static const struct {
    const KernelKind *float32, *bfloat16, *levels;
} kernel_sets[NUM_INSTRUCTION_SETS] = {
    [SCALAR] = {&scalar_float32, NULL, &scalar_levels},
#if ON_X86
    [AVX2] = {&avx2_float32, NULL, &avx2_levels},
    [AVX512] = {&avx512_float32, NULL, &avx512_levels},
    [AVX512_BF16] = {&avx512_float32, &avx512_bfloat16, &avx512_levels},
#endif
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- one chunk: some rows by some tiles ---- */

/* One run of a tile for all rows of a chunk, in blocks of about the same size. Many blocks share a decoded copy. */
static void multiply_run(const LinearCall *call, Place place, int64_t num_rows, uint32_t *decoded) {
    const KernelKind *kernels = call->kernels;
    const DecodeKernel decode = kernels->decode[width_index(call->weight->bits)];
    const int64_t blocks = (num_rows + kernels->most_rows - 1) / kernels->most_rows;
    const int64_t block = (num_rows + blocks - 1) / blocks;
    int width = width_index(call->weight->bits);
    if (decode != NULL && blocks > BLOCKS_WITHOUT_DECODING) {
        decode(place.words, &call->prepared, call->prepared.run, decoded);
        place.words = decoded;
        width = width_index(kernels->decoded_bits);
    }
    for (int64_t done = 0; done < num_rows; done += block) {
        const int64_t rows = smaller(num_rows - done, block);
        const Place part = {place.tile, place.run, place.row + done, place.words, place.sums + done * TILE};
        kernels->run[width][rows - 1](call->weight, &call->prepared, &part);
    }
}

INLINE void finish_row(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    const int64_t first = tile * TILE, count = smaller(call->weight->out_features - first, TILE);
    const int64_t at = row * call->y_stride + first;
    const float *bias = call->weight->bias;
    if (bias != NULL)
        for (int64_t i = 0; i < count; i++) sums[i] += bias[first + i];
    if (call->type == FLOAT32)
        memcpy((float *)call->y + at, sums, (size_t)count * sizeof *sums);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)call->y)[at + i] = bfloat16_of(sums[i]);
}

static void finish_scalar(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    finish_row(call, row, tile, sums);
}
#if ON_X86
FOR_AVX2 static void finish_avx2(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    finish_row(call, row, tile, sums);
}
FOR_AVX512 static void finish_avx512(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    finish_row(call, row, tile, sums);
}
#endif
static const FinishRow finish_by_set[NUM_INSTRUCTION_SETS] = BY_SET(finish);

static void multiply_tile(const LinearCall *call, int64_t tile, int64_t row, int64_t num_rows) {
    float sums[ROWS_PER_CHUNK * TILE];
    uint32_t decoded[LONGEST_RUN * TILE];
    const int64_t run_words = call->prepared.run * call->weight->bits / 32 * TILE;
    memset(sums, 0, (size_t)(num_rows * TILE) * sizeof *sums);
    Place place = {tile, 0, row, call->weight->words + tile * call->prepared.num_runs * run_words, sums};
    for (; place.run < call->prepared.num_runs; place.run++, place.words += run_words)
        multiply_run(call, place, num_rows, decoded);
    for (int64_t r = 0; r < num_rows; r++) call->finish(call, row + r, tile, sums + r * TILE);
}

static void multiply_chunk(void *context, int64_t chunk) {
    const LinearCall *call = context;
    const int64_t chunks_of_tiles = (call->num_tiles + call->tiles_per_chunk - 1) / call->tiles_per_chunk;
    const int64_t row = chunk / chunks_of_tiles * call->rows_per_chunk;
    const int64_t first = chunk % chunks_of_tiles * call->tiles_per_chunk;
    const int64_t last = smaller(first + call->tiles_per_chunk, call->num_tiles);
    for (int64_t tile = first; tile < last; tile++)
        multiply_tile(call, tile, row, smaller(call->rows_per_chunk, call->rows - row));
}

/* ---- the call ---- */

static void prepare_chunk(void *context, int64_t chunk) {
    const LinearCall *call = context;
    const int64_t first = chunk * ROWS_PER_PREPARATION, last = smaller(first + ROWS_PER_PREPARATION, call->rows);
    for (int64_t row = first; row < last; row++) call->prepare(call, row);
}

static void fill_tables(Prepared *prepared, const LinearWeight *weight) {
    const int mask = weight->bits == 2 ? 3 : 15;
    for (int i = 0; i < 16; i++) prepared->floats[i] = weight->table[i & mask];
    for (int i = 0; i < 32; i++) prepared->pairs[i] = bfloat16_of(weight->table[i & mask]);
}

static void cut_chunks(LinearCall *call) {
    const LinearWeight *weight = call->weight;
    call->num_tiles = (weight->out_features + TILE - 1) / TILE;
    call->rows_per_chunk = smaller(call->rows, ROWS_PER_CHUNK);
    const double numbers = (double)(TILE * weight->in_features);
    const double reading = numbers * weight->bits / 8 / BYTES_PER_NANOSECOND;
    const double multiplying = numbers * (double)call->rows_per_chunk / PRODUCTS_PER_NANOSECOND;
    const int64_t tiles = (int64_t)(CHUNK_NANOSECONDS / (reading > multiplying ? reading : multiplying));
    call->tiles_per_chunk = tiles < 1 ? 1 : smaller(tiles, (call->num_tiles + 3) / 4);
}

/* Allocates what prepare_row fills, in one piece; it is the caller's to free. NULL when there is no memory. */
static void *make_room(LinearCall *call) {
    const LinearWeight *weight = call->weight;
    Prepared *prepared = &call->prepared;
    const bool levels = call->activations != ACTIVATIONS_FLOAT;
    const bool widened = !levels && call->type == BFLOAT16 && call->kernels->decoded_bits == 32;
    prepared->run = levels && (call->activations == ACTIVATIONS_INT8_ROW) ? weight->group : run_of(weight->group);
    prepared->num_runs = weight->in_features / prepared->run;
    prepared->num_groups = weight->in_features / weight->group;
    prepared->runs_per_group = weight->group / prepared->run;
    const size_t numbers = (size_t)(call->rows * weight->in_features), runs = (size_t)(call->rows * prepared->num_runs);
    const size_t converted = levels ? numbers : widened ? numbers * sizeof(float) : 0;
    const size_t sums = levels || weight->zeros != NULL ? runs * sizeof(float) : 0;
    char *room = malloc(sums + sums + converted + 1);
    if (room == NULL) return NULL;
    call->sums = sums ? (float *)room : NULL;
    call->level_sums = levels ? (int32_t *)(room + sums) : NULL;
    call->converted = converted ? room + sums + sums : NULL;
    prepared->x = converted ? call->converted : call->x;
    prepared->stride = converted ? weight->in_features : call->x_stride;
    prepared->sums = prepared->level_scales = call->sums;
    prepared->level_sums = call->level_sums;
    return room;
}

static const KernelKind *choose_kernels(int set, Activations activations, NumberType type, int bits) {
    if (activations != ACTIVATIONS_FLOAT) return kernel_sets[set].levels;
    return type == BFLOAT16 && bits != SPARSE && kernel_sets[set].bfloat16 != NULL ? kernel_sets[set].bfloat16 : kernel_sets[set].float32;
}

int linear_multiply(const LinearWeight *weight, int activations, int type, int64_t rows, const void *x,
                    int64_t x_stride, void *y, int64_t y_stride, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return LINEAR_NO_INSTRUCTIONS;
    if (rows < 1) return LINEAR_OK;
    LinearCall call = {.weight = weight,
                       .kernels = choose_kernels(set, (Activations)activations, (NumberType)type, weight->bits),
                       .prepare = prepare_by_set[set],
                       .finish = finish_by_set[set],
                       .type = (NumberType)type,
                       .activations = (Activations)activations,
                       .x = x,
                       .x_stride = x_stride,
                       .rows = rows,
                       .y = y,
                       .y_stride = y_stride};
    void *room = make_room(&call);
    if (room == NULL) return LINEAR_NO_MEMORY;
    fill_tables(&call.prepared, weight);
    cut_chunks(&call);
    if (call.sums != NULL || call.converted != NULL)
        pool_run(prepare_chunk, &call, (rows + ROWS_PER_PREPARATION - 1) / ROWS_PER_PREPARATION);
    const int64_t row_chunks = (rows + call.rows_per_chunk - 1) / call.rows_per_chunk;
    pool_run(multiply_chunk, &call, row_chunks * ((call.num_tiles + call.tiles_per_chunk - 1) / call.tiles_per_chunk));
    free(room);
    return LINEAR_OK;
}
