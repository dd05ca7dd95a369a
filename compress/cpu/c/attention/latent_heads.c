#include "attention/latent_heads.h"

#include "common/bf16.h"
#include "common/thread_pool.h"

enum {
    AT_ONCE = 32, /* rows for which each weight is unpacked once */
    BLOCK = 8,    /* of them, those whose sums stay in registers */
    LINES = 16,   /* rows of weights that are unpacked together */
};

typedef uint8_t ByteLanes __attribute__((vector_size(16)));

INLINE Lanes lanes_of_bytes(ByteLanes bytes) { return __builtin_convertvector(__builtin_convertvector(bytes, IntLanes), Lanes); }

/* One number in all lanes, as one instruction. */
INLINE Lanes repeated(float x) {
#if defined(__clang__)
    return lanes_of(x);
#else
    return __builtin_shuffle((Lanes){x}, (IntLanes){0});
#endif
}

/* One row of a head, [rank]. */
INLINE void unpack_row(const LatentHeads *weights, int64_t row, float *to) {
    const uint8_t *codes = weights->codes + row * weights->rank * weights->bits / 8;
    const int64_t groups = weights->rank / weights->group;
    for (int64_t group = row * groups; group < (row + 1) * groups; group++) {
        const Lanes scale = repeated(weights->scales[group]), zero = repeated(weights->zeros[group]);
        for (const float *end = to + weights->group; to < end; to += 2 * LANES, codes += weights->bits * LANES / 4) {
            ByteLanes first, second;
            memcpy(&first, codes, sizeof first);
            if (weights->bits == 8) {
                memcpy(&second, codes + LANES, sizeof second);
            } else {
                second = first >> 4;
                first &= 15;
            }
            lanes_store(to, (lanes_of_bytes(first) - zero) * scale);
            lanes_store(to + LANES, (lanes_of_bytes(second) - zero) * scale);
        }
    }
}

INLINE int64_t first_row(const LatentHeads *weights, int64_t head) { return head * (weights->own + weights->value_dim); }

/* Rows of a product that belong to one head and are computed together. */
typedef struct {
    int64_t head, first, count;
} Rows;

INLINE Rows rows_of(const LatentProduct *product, int64_t chunk) {
    const int64_t heads = product->weights->heads, first = chunk / heads * AT_ONCE, left = product->rows - first;
    return (Rows){chunk % heads, first, left < AT_ONCE ? left : AT_ONCE};
}

/* Adds products of weights [count, rank] with factors of `height` rows to sums of 2 * LANES columns. */
INLINE void add_products(const float *weights, int64_t count, int64_t rank, float factors[AT_ONCE][LINES], float *sums, const int height) {
    Lanes sum[BLOCK][2];
    for (int row = 0; row < height; row++)
        for (int half = 0; half < 2; half++) sum[row][half] = lanes_load(sums + row * LONGEST_LATENT + half * LANES);
    for (int64_t k = 0; k < count; k++) {
        const Lanes first = lanes_load(weights + k * rank), second = lanes_load(weights + k * rank + LANES);
        for (int row = 0; row < height; row++) {
            const Lanes factor = repeated(factors[row][k]);
            sum[row][0] += factor * first;
            sum[row][1] += factor * second;
        }
    }
    for (int row = 0; row < height; row++)
        for (int half = 0; half < 2; half++) lanes_store(sums + row * LONGEST_LATENT + half * LANES, sum[row][half]);
}

INLINE void absorb(const LatentProduct *product, int64_t chunk) {
    const LatentHeads *weights = product->weights;
    const Rows rows = rows_of(product, chunk);
    const int64_t rank = weights->rank;
    float sums[AT_ONCE][LONGEST_LATENT], unpacked[LINES * LONGEST_LATENT], factors[AT_ONCE][LINES];
    memset(sums, 0, sizeof sums);
    for (int64_t begin = 0; begin < weights->own; begin += LINES) {
        const int64_t lines = weights->own - begin < LINES ? weights->own - begin : LINES;
        for (int64_t k = 0; k < lines; k++) unpack_row(weights, first_row(weights, rows.head) + begin + k, unpacked + k * rank);
        for (int64_t row = 0; row < rows.count; row++)
            for (int64_t k = 0; k < lines; k++)
                factors[row][k] = float_of_bfloat16(
                    product->from[(rows.first + row) * product->from_row + rows.head * product->from_head + begin + k]);
        for (int64_t column = 0; column < rank; column += 2 * LANES) {
            int64_t row = 0;
            for (; row + BLOCK <= rows.count; row += BLOCK)
                add_products(unpacked + column, lines, rank, factors + row, sums[row] + column, BLOCK);
            for (; row < rows.count; row++) add_products(unpacked + column, lines, rank, factors + row, sums[row] + column, 1);
        }
    }
    for (int64_t row = 0; row < rows.count; row++)
        for (int64_t column = 0; column < rank; column += LANES)
            lanes_store_bfloat16(product->to + ((rows.first + row) * weights->heads + rows.head) * rank + column,
                                 lanes_load(sums[row] + column));
}

/* Products of one row of weights with `height` rows [rank]. */
INLINE void sum_products(const float *weight, int64_t rank, float x[AT_ONCE][LONGEST_LATENT], float *sums, const int height) {
    Lanes sum[BLOCK][2];
    for (int row = 0; row < height; row++) sum[row][0] = sum[row][1] = (Lanes){0};
    for (int64_t column = 0; column < rank; column += 2 * LANES) {
        const Lanes first = lanes_load(weight + column), second = lanes_load(weight + column + LANES);
        for (int row = 0; row < height; row++) {
            sum[row][0] += first * lanes_load(x[row] + column);
            sum[row][1] += second * lanes_load(x[row] + column + LANES);
        }
    }
    for (int row = 0; row < height; row++) sums[row] = sum_of_lanes(sum[row][0] + sum[row][1]);
}

INLINE void make_values(const LatentProduct *product, int64_t chunk) {
    const LatentHeads *weights = product->weights;
    const Rows rows = rows_of(product, chunk);
    const int64_t rank = weights->rank;
    float weight[LONGEST_LATENT], x[AT_ONCE][LONGEST_LATENT], sums[AT_ONCE];
    for (int64_t row = 0; row < rows.count; row++)
        for (int64_t column = 0; column < rank; column += LANES)
            lanes_store(x[row] + column, lanes_load_bfloat16(product->from + (rows.first + row) * product->from_row +
                                                             rows.head * product->from_head + column));
    for (int64_t v = 0; v < weights->value_dim; v++) {
        unpack_row(weights, first_row(weights, rows.head) + weights->own + v, weight);
        int64_t row = 0;
        for (; row + BLOCK <= rows.count; row += BLOCK) sum_products(weight, rank, x + row, sums + row, BLOCK);
        for (; row < rows.count; row++) sum_products(weight, rank, x + row, sums + row, 1);
        for (row = 0; row < rows.count; row++)
            product->to[((rows.first + row) * weights->heads + rows.head) * weights->value_dim + v] = bfloat16_of(sums[row]);
    }
}

INLINE void unpack(const LatentProduct *product, int64_t head) {
    const LatentHeads *weights = product->weights;
    float weight[LONGEST_LATENT];
    for (int64_t row = first_row(weights, head); row < first_row(weights, head + 1); row++) {
        unpack_row(weights, row, weight);
        for (int64_t column = 0; column < weights->rank; column += LANES)
            lanes_store_bfloat16(product->to + row * weights->rank + column, lanes_load(weight + column));
    }
}

#define PLAIN(name) static void name##_scalar(void *product, int64_t chunk) { name(product, chunk); }
#if ON_X86
#define FOR_SETS(name)                                                                      \
    PLAIN(name)                                                                             \
    FOR_AVX2 static void name##_avx2(void *product, int64_t chunk) { name(product, chunk); } \
    FOR_AVX512 static void name##_avx512(void *product, int64_t chunk) { name(product, chunk); }
#else
#define FOR_SETS(name) PLAIN(name)
#endif
FOR_SETS(absorb)
FOR_SETS(make_values)
FOR_SETS(unpack)

static int run(const PoolTask *tasks, const LatentProduct *product, int64_t chunks, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    pool_run(tasks[set], (void *)product, chunks);
    return 0;
}

static int64_t count_chunks(const LatentProduct *product) {
    return (product->rows + AT_ONCE - 1) / AT_ONCE * product->weights->heads;
}

int absorb_queries(const LatentProduct *product, int instruction_set) {
    static const PoolTask tasks[NUM_INSTRUCTION_SETS] = BY_SET(absorb);
    return run(tasks, product, count_chunks(product), instruction_set);
}

int latent_values(const LatentProduct *product, int instruction_set) {
    static const PoolTask tasks[NUM_INSTRUCTION_SETS] = BY_SET(make_values);
    return run(tasks, product, count_chunks(product), instruction_set);
}

int unpack_latent_heads(const LatentProduct *product, int instruction_set) {
    static const PoolTask tasks[NUM_INSTRUCTION_SETS] = BY_SET(unpack);
    return run(tasks, product, product->rows, instruction_set);
}
