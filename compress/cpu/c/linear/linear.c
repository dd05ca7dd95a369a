/* Products of linear_multiply and linear_multiply_all: activations converted, products in chunks, results. */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "common/hadamard.h"
#include "common/thread_pool.h"
#include "linear/tiles.h"

typedef struct LinearCall LinearCall;
/* One row: converts it and sums up its runs. */
typedef void (*PrepareRow)(const LinearCall *call, int64_t row);
/* The sums of one row and tile, with the bias, as results. */
typedef void (*FinishRow)(const LinearCall *call, int64_t row, int64_t tile, float *sums);

/* State of one product. */
struct LinearCall {
    const LinearWeight *weight;
    const KernelKind *kernels;
    PrepareRow prepare;
    FinishRow finish;
    NumberType type; /* of x and y */
    Activations activations;
    const void *x;
    int64_t x_stride, rows;
    const void *given; /* what x is made of, by rows, where inputs are multiplied by Hadamard matrices */
    int64_t given_stride;
    void *y;
    int64_t y_stride;
    void *converted; /* [rows][I], where activations are not taken as they come */
    float *sums;
    int32_t *q8_sums;
    Prepared prepared;
    int64_t rows_per_chunk, tiles_per_chunk, num_tiles;
    int64_t preparations, chunks; /* of the pool's */
};

/* Numbers that the largest magnitude becomes before rounding, and largest codes: 4 bits clip it by a step where it is positive, so
 * that all steps are smaller. */
static const float LARGEST_Q8 = 127, LARGEST_Q4 = 8;
enum { LAST_Q8 = 127, LAST_Q4 = 7 };

INLINE bool has_row_scale(const LinearCall *call) { return call->activations >= ACTIVATIONS_INT8_ROW; }
INLINE bool is_q4(const LinearCall *call) { return call->activations == ACTIVATIONS_INT4_ROW; }

/* The largest number of inputs that divides a group and is at most LONGEST_RUN. */
static int64_t run_of(int64_t group) {
    int64_t run = group < LONGEST_RUN ? group : LONGEST_RUN;
    while (group % run) run -= INPUT_MULTIPLE;
    return run;
}

/* Inputs [start, start + count) as float32. */
INLINE void load_some(const LinearCall *call, int64_t row, int64_t start, int count, float *values) {
    const int64_t at = row * call->x_stride + start;
    if (call->type == FLOAT32) {
        memcpy(values, (const float *)call->x + at, (size_t)count * sizeof *values);
        return;
    }
    const uint16_t *halves = (const uint16_t *)call->x + at;
    for (int i = 0; i < count; i++) values[i] = float_of_bfloat16(halves[i]);
}

INLINE void load_activations(const LinearCall *call, int64_t row, int64_t start, float *values) {
    load_some(call, row, start, INPUT_MULTIPLE, values);
}

/* Sum of `run` inputs, in an order that has no part in which row it is. */
INLINE float sum_run(const LinearCall *call, int64_t row, int64_t start) {
    float values[INPUT_MULTIPLE], sums[INPUT_MULTIPLE] = {0}, sum = 0;
    if (call->prepared.run == SMALL_GROUP) {
        load_some(call, row, start, SMALL_GROUP, values);
        for (int i = 0; i < SMALL_GROUP; i++) sum += values[i];
        return sum;
    }
    for (int64_t k = 0; k < call->prepared.run; k += INPUT_MULTIPLE) {
        load_activations(call, row, start + k, values);
        for (int i = 0; i < INPUT_MULTIPLE; i++) sums[i] += values[i];
    }
    for (int i = 0; i < INPUT_MULTIPLE; i++) sum += sums[i];
    return sum;
}

/* As bits, so that NaN is larger than any number and is not lost. */
INLINE float largest_magnitude(const LinearCall *call, int64_t row, int64_t start, int64_t count) {
    float values[INPUT_MULTIPLE];
    int32_t largest[INPUT_MULTIPLE] = {0}, found = 0;
    for (int64_t k = 0; k < count; k += INPUT_MULTIPLE) {
        load_activations(call, row, start + k, values);
        for (int i = 0; i < INPUT_MULTIPLE; i++) {
            const int32_t bits = (int32_t)(bits_of_float(values[i]) & 0x7fffffff);
            largest[i] = bits > largest[i] ? bits : largest[i];
        }
    }
    for (int i = 0; i < INPUT_MULTIPLE; i++) found = largest[i] > found ? largest[i] : found;
    return float_of_bits((uint32_t)found);
}

/* Rounded half to even: adding 1.5 * 2^23 leaves no bits behind the point. */
INLINE int32_t round_q8(float value) { return (int32_t)(bits_of_float(value + 12582912.0f) - 0x4b400000u); }

INLINE void order_q8(const int32_t *rounded, int bits, int8_t *q8) {
    const int per_word = 32 / bits;
#pragma GCC unroll 32
    for (int i = 0; i < INPUT_MULTIPLE; i++)
        q8[i] = (int8_t)rounded[i / per_word * per_word + q8_input(i % per_word, bits)];
}

/* Inputs of one run as 8-bit activations, in the order that codes lie in; returns their sum. A scale that is not finite
 * makes the row NaN by itself, so its activations do not matter; nor do those of scale 0. */
INLINE int32_t quantize_run(const LinearCall *call, int64_t row, int64_t start, float scale, int8_t *q8) {
    const bool usable = scale > 0;
    const int32_t last = is_q4(call) ? LAST_Q4 : LAST_Q8;
    float values[INPUT_MULTIPLE];
    int32_t rounded[INPUT_MULTIPLE] = {0}, sums[INPUT_MULTIPLE] = {0}, sum = 0;
    for (int64_t k = 0; k < call->prepared.run; k += INPUT_MULTIPLE) {
        load_activations(call, row, start + k, values);
        if (usable)
            for (int i = 0; i < INPUT_MULTIPLE; i++) {
                const int32_t code = round_q8(values[i] / scale);
                rounded[i] = code < last ? code : last;
            }
        for (int i = 0; i < INPUT_MULTIPLE; i++) sums[i] += rounded[i];
        switch (call->weight->bits) {
        case 2: order_q8(rounded, 2, q8 + k); break;
        case 4: order_q8(rounded, 4, q8 + k); break;
        default: order_q8(rounded, 8, q8 + k);
        }
    }
    for (int i = 0; i < INPUT_MULTIPLE; i++) sum += sums[i];
    return sum;
}

/* NaN for a row that is not finite; comparisons with it are false. */
INLINE float q8_scale(const LinearCall *call, int64_t row, int64_t start, int64_t count) {
    const float scale = largest_magnitude(call, row, start, count) / (is_q4(call) ? LARGEST_Q4 : LARGEST_Q8);
    return scale <= FLT_MAX ? scale : NAN;
}

INLINE void prepare_q8(const LinearCall *call, int64_t row) {
    const Prepared *prepared = &call->prepared;
    const int64_t inputs = call->weight->in_features;
    const float whole = has_row_scale(call) ? q8_scale(call, row, 0, inputs) : 0;
    for (int64_t run = 0; run < prepared->num_runs; run++) {
        const int64_t start = run * prepared->run, at = row * prepared->num_runs + run;
        const float scale = has_row_scale(call) ? whole : q8_scale(call, row, start, prepared->run);
        call->sums[at] = scale;
        call->q8_sums[at] = quantize_run(call, row, start, scale, (int8_t *)call->converted + row * inputs + start);
    }
}

/* A row of x from what is given. */
INLINE void turn_row(const LinearCall *call, int64_t row) {
    const int64_t block = call->weight->hadamard, step = block < INPUT_MULTIPLE ? INPUT_MULTIPLE : block;
    float turned[LONGEST_RUN];
    for (int64_t k = 0; k < call->x_stride; k += step) {
        const int64_t at = row * call->x_stride + k, from = row * call->given_stride + k;
        if (call->type == FLOAT32)
            memcpy(turned, (const float *)call->given + from, (size_t)step * sizeof *turned);
        else
            for (int64_t i = 0; i < step; i += LANES)
                lanes_store(turned + i, lanes_load_bfloat16((const uint16_t *)call->given + from + i));
        hadamard_blocks(turned, step, block);
        if (call->type == FLOAT32)
            memcpy((float *)call->x + at, turned, (size_t)step * sizeof *turned);
        else
            for (int64_t i = 0; i < step; i += LANES) lanes_store_bfloat16((uint16_t *)call->x + at + i, lanes_load(turned + i));
    }
}

INLINE void prepare_row(const LinearCall *call, int64_t row) {
    const int64_t inputs = call->weight->in_features, runs = call->prepared.num_runs;
    if (call->given != NULL) turn_row(call, row);
    if (call->activations != ACTIVATIONS_FLOAT) {
        prepare_q8(call, row);
        return;
    }
    if (call->converted != NULL)
        for (int64_t k = 0; k < inputs; k += INPUT_MULTIPLE)
            load_activations(call, row, k, (float *)call->converted + row * inputs + k);
    if (call->sums != NULL)
        for (int64_t run = 0; run < runs; run++) call->sums[row * runs + run] = sum_run(call, row, run * call->prepared.run);
}

/* In plain C: the compiler makes of it what each instruction set has. */
static void prepare_scalar(const LinearCall *call, int64_t row) { prepare_row(call, row); }
#if ON_X86
FOR_AVX2 static void prepare_avx2(const LinearCall *call, int64_t row) { prepare_row(call, row); }
FOR_AVX512 static void prepare_avx512(const LinearCall *call, int64_t row) { prepare_row(call, row); }
#endif

static const PrepareRow prepare_by_set[NUM_INSTRUCTION_SETS] = BY_SET(prepare);

/* One chunk of a product: some rows by some tiles. */

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

/* Bytes that are places in a table, as float32 for any instruction set. */
static void decode_values(const uint32_t *words, const Prepared *input, uint32_t *decoded) {
    for (int64_t k = 0; k < input->run; k += 4, words += TILE)
        for (int i = 0; i < 4; i++, decoded += TILE)
            for (int feature = 0; feature < TILE; feature++)
                decoded[feature] = bits_of_float(input->values[words[feature] >> code_shift(i, 8) & 255]);
}

static DecodeKernel decode_of(const LinearCall *call, int64_t blocks) {
    if (call->prepared.values != NULL) return decode_values;
    return blocks > call->kernels->undecoded_blocks ? call->kernels->decode[kernel_index(call->weight)] : NULL;
}

/* One run of a tile after the other for all rows of a chunk, in blocks of about the same size. Each place is written again: a
 * copy of one that has just changed would wait for its parts. */
static void multiply_tile(const LinearCall *call, int64_t tile, int64_t row, int64_t num_rows) {
    const KernelKind *kernels = call->kernels;
    const LinearWeight *weight = call->weight;
    float sums[ROWS_PER_CHUNK * TILE];
    uint32_t decoded[LONGEST_RUN * TILE];
    const int64_t run_words = call->prepared.run * weight->bits / 32 * TILE, num_runs = call->prepared.num_runs;
    const int64_t blocks = parts(num_rows, kernels->most_rows), block = parts(num_rows, blocks);
    const DecodeKernel decode = decode_of(call, blocks);
    const RunKernel multiply = kernels->run[decode != NULL ? width_index(kernels->decoded_bits) : kernel_index(weight)];
    const uint32_t *words = weight->words + tile * num_runs * run_words;
    memset(sums, 0, (size_t)(num_rows * TILE) * sizeof *sums);
    for (int64_t run = 0; run < num_runs; run++, words += run_words) {
        if (decode != NULL) decode(words, &call->prepared, decoded);
        for (int64_t done = 0; done < num_rows; done += block) {
            const int rows = (int)smaller(num_rows - done, block);
            const Place place = {tile, run, row + done, rows, decode != NULL ? decoded : words, sums + done * TILE};
            multiply(weight, &call->prepared, &place);
        }
    }
    for (int64_t r = 0; r < num_rows; r++) call->finish(call, row + r, tile, sums + r * TILE);
}

/* rows_per_chunk rows by tiles_per_chunk tiles of the call that a chunk falls to; chunks of the same rows follow each other. */
static void multiply_chunk(void *context, int64_t chunk) {
    const LinearCall *call = context;
    for (; chunk >= call->chunks; call++) chunk -= call->chunks;
    const int64_t chunks_of_tiles = parts(call->num_tiles, call->tiles_per_chunk);
    const int64_t row = chunk / chunks_of_tiles * call->rows_per_chunk;
    const int64_t first = chunk % chunks_of_tiles * call->tiles_per_chunk;
    const int64_t last = smaller(first + call->tiles_per_chunk, call->num_tiles);
    const int64_t rows = smaller(call->rows_per_chunk, call->rows - row);
    if (call->kernels->enter != NULL) call->kernels->enter(&call->prepared, rows);
    for (int64_t tile = first; tile < last; tile++) multiply_tile(call, tile, row, rows);
    if (call->kernels->leave != NULL) call->kernels->leave();
}

enum { ROWS_PER_PREPARATION = 8 };
/* Rough speed of one core, from which chunks of some ten microseconds are cut. */
static const double CHUNK_NANOSECONDS = 40000, BYTES_PER_NANOSECOND = 15, PRODUCTS_PER_NANOSECOND = 150;

/* Without a kind for bfloat16 such activations are widened. A kind for few rows has the bits of the one for many. */
static const struct {
    const KernelKind *float32, *bfloat16, *q8, *few_bfloat16, *few_q8;
} kernel_sets[NUM_INSTRUCTION_SETS] = {
    [SCALAR] = {&scalar_float32, NULL, &scalar_q8},
#if ON_ARM
    [NEON] = {&neon_float32, NULL, &neon_q8},
    [NEON_DOTPROD] = {&neon_float32, NULL, &neon_dotprod_q8},
    [NEON_I8MM] = {&neon_float32, NULL, &neon_i8mm_q8},
#endif
#if ON_X86
    [AVX2] = {&avx2_float32, NULL, &avx2_q8},
    [AVX512] = {&avx512_float32, NULL, &avx512_q8},
    [AVX512_BF16] = {&avx512_float32, &avx512_bfloat16, &avx512_q8},
    [AMX] = {&avx512_float32, &amx_bfloat16, &amx_q8, &avx512_tile_order, &avx512_q8},
    [AMX_EMULATED] = {&scalar_float32, &emulated_bfloat16, &emulated_q8, &avx512_tile_order, &avx512_q8},
#else
    [AMX_EMULATED] = {&scalar_float32, &emulated_bfloat16, &emulated_q8},
#endif
};

#if ON_X86

/* Whether matrix tiles add products up in the order that matrix_tiles.h says: asked once, of numbers of all sizes. */
static bool is_ordered(const KernelKind *tiles, const KernelKind *vectors) {
    enum { ROWS = 3, INPUTS = 64 };
    uint16_t numbers[TILE + ROWS][INPUTS];
    uint32_t words[INPUTS / 2 * TILE], state = 1;
    float by_tiles[ROWS * TILE] = {0}, by_vectors[ROWS * TILE] = {0};
    for (int i = 0; i < (TILE + ROWS) * INPUTS; i++) {
        state = state * 1664525u + 1013904223u;
        numbers[i / INPUTS][i % INPUTS] = (uint16_t)(state >> 16 & 0x807f) | (uint16_t)((115 + (state >> 8) % 24) << 7);
    }
    linear_pack_bfloat16(numbers[0], TILE, INPUTS, words);
    const LinearWeight weight = {.out_features = TILE, .in_features = INPUTS, .group = INPUTS, .bits = 16, .words = words};
    const Prepared input = {.x = numbers[TILE], .stride = INPUTS, .run = INPUTS, .num_runs = 1, .num_groups = 1,
                            .runs_per_group = 1};
    Place place = {.rows = ROWS, .words = words, .sums = by_tiles};
    tiles->enter(&input, ROWS);
    tiles->run[width_index(16)](&weight, &input, &place);
    tiles->leave();
    place.sums = by_vectors;
    vectors->run[width_index(16)](&weight, &input, &place);
    return memcmp(by_tiles, by_vectors, sizeof by_tiles) == 0;
}

static bool amx_is_ordered;
static void ask_for_order(void) { amx_is_ordered = is_ordered(&amx_bfloat16, &avx512_tile_order); }

/* Whether a few rows need not wait for matrix tiles. */
static bool few_rows_take_vectors(int set) {
    static pthread_once_t asked = PTHREAD_ONCE_INIT;
    if (set == AMX_EMULATED) return native_best_instruction_set() >= AVX512;
    if (set == AMX) pthread_once(&asked, ask_for_order);
    return set == AMX && amx_is_ordered;
}

#else

static bool few_rows_take_vectors(int set) {
    (void)set;
    return false;
}

#endif

static void prepare_chunk(void *context, int64_t chunk) {
    const LinearCall *call = context;
    for (; chunk >= call->preparations; call++) chunk -= call->preparations;
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
    call->num_tiles = parts(weight->out_features, TILE);
    call->rows_per_chunk = smaller(call->rows, ROWS_PER_CHUNK);
    const double numbers = (double)(TILE * weight->in_features);
    const double reading = numbers * weight->bits / 8 / BYTES_PER_NANOSECOND;
    const double multiplying = numbers * (double)call->rows_per_chunk / PRODUCTS_PER_NANOSECOND;
    const int64_t tiles = (int64_t)(CHUNK_NANOSECONDS / (reading > multiplying ? reading : multiplying));
    call->tiles_per_chunk = tiles < 1 ? 1 : smaller(tiles, parts(call->num_tiles, 2 * pool_threads()));
    call->chunks = parts(call->rows, call->rows_per_chunk) * parts(call->num_tiles, call->tiles_per_chunk);
}

/* Allocates what prepare_row fills, in one piece; it is the caller's to free. NULL when out of memory. */
static void *make_room(LinearCall *call) {
    const LinearWeight *weight = call->weight;
    Prepared *prepared = &call->prepared;
    const bool q8 = call->activations != ACTIVATIONS_FLOAT;
    const bool widened = !q8 && call->type == BFLOAT16 && call->kernels->decoded_bits == 32;
    prepared->run = has_row_scale(call) ? weight->group : run_of(weight->group);
    prepared->num_runs = weight->in_features / prepared->run;
    prepared->num_groups = weight->in_features / weight->group;
    prepared->runs_per_group = weight->group / prepared->run;
    const size_t numbers = (size_t)(call->rows * weight->in_features), runs = (size_t)(call->rows * prepared->num_runs);
    const size_t converted = q8 ? numbers : widened ? numbers * sizeof(float) : 0;
    prepared->num_blocks = weight->steps != NULL ? weight->in_features / weight->block : prepared->num_groups;
    prepared->runs_per_block = prepared->num_runs / prepared->num_blocks;
    const size_t sums = q8 || weight->zeros != NULL || weight->minima != NULL ? runs * sizeof(float) : 0;
    const size_t turned = weight->hadamard ? numbers * (call->type == FLOAT32 ? sizeof(float) : sizeof(uint16_t)) : 0;
    char *room = malloc(sums + sums + converted + turned + 1);
    if (room == NULL) return NULL;
    if (turned) {
        call->given = call->x, call->given_stride = call->x_stride;
        call->x = room + sums + sums + converted, call->x_stride = weight->in_features;
    }
    call->sums = sums ? (float *)room : NULL;
    call->q8_sums = q8 ? (int32_t *)(room + sums) : NULL;
    call->converted = converted ? room + sums + sums : NULL;
    prepared->x = converted ? call->converted : call->x;
    prepared->stride = converted ? weight->in_features : call->x_stride;
    prepared->sums = prepared->q8_scales = call->sums;
    prepared->q8_sums = call->q8_sums;
    return room;
}

/* Whether the table is the same in bfloat16, so that pairs of it are the weight. */
static bool has_exact_pairs(const LinearWeight *weight) {
    for (int i = 0; i < 16; i++)
        if (float_of_bfloat16(bfloat16_of(weight->table[i])) != weight->table[i]) return false;
    return true;
}

static const KernelKind *choose_kernels(int set, const LinearCall *call) {
    const int64_t fewest = call->weight->fewest_tile_rows;
    if (set >= FIRST_WITH_TILES && !fewest) set = (int)smaller(native_best_instruction_set(), FIRST_WITH_TILES - 1);
    const bool few = call->rows < smaller(fewest, FEW_ROWS + 1) && few_rows_take_vectors(set);
    if (call->activations != ACTIVATIONS_FLOAT) return few ? kernel_sets[set].few_q8 : kernel_sets[set].q8;
    if (call->type != BFLOAT16 || call->weight->bits == SPARSE || kernel_sets[set].bfloat16 == NULL ||
        call->prepared.values != NULL || !has_exact_pairs(call->weight))
        return kernel_sets[set].float32;
    return few ? kernel_sets[set].few_bfloat16 : kernel_sets[set].bfloat16;
}

/* Fills in a call that begins with operands; returns what is to be freed, or NULL when out of memory. */
static void *begin(LinearCall *call, int set) {
    call->prepared.values = call->weight->bits == 8 ? call->weight->values : NULL;
    call->kernels = choose_kernels(set, call);
    call->prepare = prepare_by_set[set];
    call->finish = finish_by_set[set];
    void *room = make_room(call);
    if (room == NULL) return NULL;
    fill_table(&call->prepared.table, call->weight, call->kernels->decoded_bits == 16);
    cut_chunks(call);
    if (call->sums != NULL || call->converted != NULL || call->given != NULL) call->preparations = parts(call->rows, ROWS_PER_PREPARATION);
    return room;
}

static int run_calls(LinearCall *calls, void **rooms, int64_t num_calls, int set) {
    int64_t begun = 0, preparations = 0, chunks = 0;
    for (; begun < num_calls && (rooms[begun] = begin(&calls[begun], set)) != NULL; begun++) {
        preparations += calls[begun].preparations;
        chunks += calls[begun].chunks;
    }
    if (begun == num_calls) {
        pool_run(prepare_chunk, calls, preparations);
        pool_run(multiply_chunk, calls, chunks);
    }
    for (int64_t i = 0; i < begun; i++) free(rooms[i]);
    return begun == num_calls ? LINEAR_OK : LINEAR_NO_MEMORY;
}

int linear_multiply(const LinearWeight *weight, int activations, int type, int64_t rows, const void *x,
                    int64_t x_stride, void *y, int64_t y_stride, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return LINEAR_NO_INSTRUCTIONS;
    if (rows < 1) return LINEAR_OK;
    void *room;
    LinearCall call = {.weight = weight, .activations = (Activations)activations, .type = (NumberType)type, .rows = rows};
    call.x = x, call.x_stride = x_stride, call.y = y, call.y_stride = y_stride;
    return run_calls(&call, &room, 1, set);
}

int linear_multiply_all(const LinearJob *jobs, int64_t num_jobs, int type, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return LINEAR_NO_INSTRUCTIONS;
    LinearCall *calls = calloc((size_t)num_jobs + 1, sizeof *calls);
    void **rooms = calloc((size_t)num_jobs + 1, sizeof *rooms);
    int status = calls == NULL || rooms == NULL ? LINEAR_NO_MEMORY : LINEAR_OK;
    int64_t used = 0;
    for (const LinearJob *job = jobs; !status && job < jobs + num_jobs; job++) {
        if (job->rows < 1) continue;
        LinearCall *call = &calls[used++];
        call->weight = job->weight, call->activations = (Activations)job->activations;
        call->type = (NumberType)type, call->rows = job->rows, call->x = job->x, call->y = job->y;
        call->x_stride = call->weight->in_features, call->y_stride = call->weight->out_features;
    }
    if (!status) status = run_calls(calls, rooms, used, set);
    free(calls), free(rooms);
    return status;
}
