#include <stdlib.h>

#include "linear_call.h"
#include "pool.h"

enum { ROWS_PER_PREPARATION = 8 };
/* Rough speed of one core, from which chunks of some ten microseconds are cut. */
static const double CHUNK_NANOSECONDS = 40000, BYTES_PER_NANOSECOND = 15, PRODUCTS_PER_NANOSECOND = 150;

/* Without a kind for bfloat16 such activations are widened. */
static const struct {
    const KernelKind *float32, *bfloat16, *levels;
} kernel_sets[NUM_INSTRUCTION_SETS] = {
    [SCALAR] = {&scalar_float32, NULL, &scalar_levels},
#if ON_ARM
    [NEON] = {&neon_float32, NULL, &neon_levels},
    [NEON_DOTPROD] = {&neon_float32, NULL, &neon_dotprod_levels},
#endif
#if ON_X86
    [AVX2] = {&avx2_float32, NULL, &avx2_levels},
    [AVX512] = {&avx512_float32, NULL, &avx512_levels},
    [AVX512_BF16] = {&avx512_float32, &avx512_bfloat16, &avx512_levels},
#endif
};

static void prepare_chunk(void *context, int64_t chunk) {
    const LinearCall *call = context;
    const int64_t first = chunk * ROWS_PER_PREPARATION, last = smaller(first + ROWS_PER_PREPARATION, call->rows);
    for (int64_t row = first; row < last; row++) call->prepare(call, row);
}

static void fill_table(CodeTable *table, const LinearWeight *weight, bool in_pairs) {
    const int mask = weight->bits == 2 ? 3 : 15;
    if (in_pairs)
        for (int i = 0; i < 32; i++) table->bfloat16[i] = bfloat16_of(weight->table[i & mask]);
    else
        for (int i = 0; i < 16; i++) table->floats[i] = weight->table[i & mask];
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
    if (type == BFLOAT16 && bits != SPARSE && kernel_sets[set].bfloat16 != NULL) return kernel_sets[set].bfloat16;
    return kernel_sets[set].float32;
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
    fill_table(&call.prepared.table, weight, call.kernels->decoded_bits == 16);
    cut_chunks(&call);
    if (call.sums != NULL || call.converted != NULL)
        pool_run(prepare_chunk, &call, (rows + ROWS_PER_PREPARATION - 1) / ROWS_PER_PREPARATION);
    const int64_t row_chunks = (rows + call.rows_per_chunk - 1) / call.rows_per_chunk;
    pool_run(multiply_chunk, &call, row_chunks * ((call.num_tiles + call.tiles_per_chunk - 1) / call.tiles_per_chunk));
    free(room);
    return LINEAR_OK;
}
