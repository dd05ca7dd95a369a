#include "glue.h"

#include <math.h>

#include "numbers.h"
#include "pool.h"

enum { CHUNK = 1 << 14, LARGEST_HEAD = 256 }; /* elements that are worth waking a thread for */

/* Which rows a chunk of the pool's is. */
typedef struct {
    const void *job;
    int64_t rows, per_chunk;
} Share;

INLINE int64_t first_row(const Share *share, int64_t chunk) { return chunk * share->per_chunk; }

INLINE int64_t last_row(const Share *share, int64_t chunk) {
    const int64_t stop = (chunk + 1) * share->per_chunk;
    return stop < share->rows ? stop : share->rows;
}

static int run(const PoolTask *tasks, const void *job, int64_t rows, int64_t row_size, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    Share share = {job, rows, CHUNK / row_size > 1 ? CHUNK / row_size : 1};
    pool_run(tasks[set], &share, (rows + share.per_chunk - 1) / share.per_chunk);
    return 0;
}

/* Writes x / sqrt(mean square + eps) * weight; x and out may be the same. */
INLINE void normalize(const uint16_t *x, const uint16_t *weight, int64_t size, float eps, uint16_t *out) {
    Lanes sum[2] = {{0}, {0}};
    for (int64_t i = 0; i < size; i += LANES) {
        const Lanes value = lanes_load_bfloat16(x + i);
        sum[i / LANES % 2] += value * value;
    }
    const Lanes factor = lanes_of(1.0f / sqrtf(sum_of_lanes(sum[0] + sum[1]) / (float)size + eps));
    for (int64_t i = 0; i < size; i += LANES)
        lanes_store_bfloat16(out + i, lanes_round_bfloat16(lanes_load_bfloat16(x + i) * factor) * lanes_load_bfloat16(weight + i));
}

INLINE void add_norm_rows(void *context, int64_t chunk) {
    const Share *share = context;
    const AddNorm *job = share->job;
    for (int64_t row = first_row(share, chunk); row < last_row(share, chunk); row++) {
        uint16_t *hidden = job->hidden + row * job->size;
        if (job->update)
            for (int64_t i = 0; i < job->size; i += LANES) {
                const Lanes update = lanes_load_bfloat16(job->update + row * job->size + i);
                lanes_store_bfloat16(hidden + i, lanes_load_bfloat16(hidden + i) + update);
            }
        normalize(hidden, job->weight, job->size, job->eps, job->out + row * job->size);
    }
}

INLINE void rotate_head(uint16_t *x, int64_t size, const uint16_t *cos, const uint16_t *sin) {
    uint16_t before[LARGEST_HEAD];
    memcpy(before, x, (size_t)size * sizeof *x);
    for (int64_t d = 0; d < size; d += LANES) {
        const Lanes other = lanes_load_bfloat16(before + (d + size / 2) % size);
        const Lanes crossed = lanes_round_bfloat16(other * lanes_load_bfloat16(sin + d));
        const Lanes straight = lanes_round_bfloat16(lanes_load_bfloat16(before + d) * lanes_load_bfloat16(cos + d));
        lanes_store_bfloat16(x + d, crossed + straight);
    }
}

INLINE void rotate_rows(void *context, int64_t chunk) {
    const Share *share = context;
    const Rotate *job = share->job;
    const int64_t size = job->head_dim;
    for (int64_t row = first_row(share, chunk); row < last_row(share, chunk); row++)
        for (int64_t head = 0; head < job->heads; head++) {
            uint16_t *x = job->x + row * job->stride + head * size;
            if (job->weight) normalize(x, job->weight + head * size, size, job->eps, x);
            rotate_head(x, size, job->cos + row * size, job->sin + row * size);
        }
}

/* Blocks of `block` dimensions, a power of two, each by itself. */
INLINE void hadamard_head(uint16_t *x, int64_t size, int64_t block) {
    float turned[LARGEST_HEAD];
    for (int64_t d = 0; d < size; d++) turned[d] = float_of_bfloat16(x[d]);
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t first = 0; first < size; first += 2 * half)
            for (int64_t d = first; d < first + half; d++) {
                const float sum = turned[d] + turned[d + half];
                turned[d + half] = turned[d] - turned[d + half];
                turned[d] = sum;
            }
    const Lanes norm = lanes_of(sqrtf((float)block));
    for (int64_t d = 0; d < size; d += LANES) lanes_store_bfloat16(x + d, lanes_load(turned + d) / norm);
}

INLINE void hadamard_rows(void *context, int64_t chunk) {
    const Share *share = context;
    const Hadamard *job = share->job;
    const int64_t block = job->head_dim & -job->head_dim;
    for (int64_t row = first_row(share, chunk); row < last_row(share, chunk); row++)
        for (int64_t head = 0; head < job->heads; head++)
            hadamard_head(job->x + row * job->stride + head * job->head_dim, job->head_dim, block);
}

INLINE void silu_multiply_rows(void *context, int64_t chunk) {
    const Share *share = context;
    const SiluMultiply *job = share->job;
    for (int64_t row = first_row(share, chunk); row < last_row(share, chunk); row++) {
        const uint16_t *gate = job->gate_up + 2 * row * job->size, *up = gate + job->size;
        for (int64_t i = 0; i < job->size; i += LANES) {
            const Lanes x = lanes_load_bfloat16(gate + i), one = lanes_of(1.0f);
            const IntLanes negative = lanes_negative((IntLanes)x);
            const Lanes small = lanes_exp(lanes_select(negative, x, -x)); /* e^-|x| cannot overflow */
            const Lanes silu = x * lanes_select(negative, small, one) / (one + small);
            lanes_store_bfloat16(job->out + row * job->size + i, lanes_round_bfloat16(silu) * lanes_load_bfloat16(up + i));
        }
    }
}

static void add_norm_scalar(void *share, int64_t chunk) { add_norm_rows(share, chunk); }
static void rotate_scalar(void *share, int64_t chunk) { rotate_rows(share, chunk); }
static void hadamard_scalar(void *share, int64_t chunk) { hadamard_rows(share, chunk); }
static void silu_multiply_scalar(void *share, int64_t chunk) { silu_multiply_rows(share, chunk); }
#if ON_X86
FOR_AVX2 static void add_norm_avx2(void *share, int64_t chunk) { add_norm_rows(share, chunk); }
FOR_AVX2 static void rotate_avx2(void *share, int64_t chunk) { rotate_rows(share, chunk); }
FOR_AVX2 static void hadamard_avx2(void *share, int64_t chunk) { hadamard_rows(share, chunk); }
FOR_AVX2 static void silu_multiply_avx2(void *share, int64_t chunk) { silu_multiply_rows(share, chunk); }
FOR_AVX512 static void add_norm_avx512(void *share, int64_t chunk) { add_norm_rows(share, chunk); }
FOR_AVX512 static void rotate_avx512(void *share, int64_t chunk) { rotate_rows(share, chunk); }
FOR_AVX512 static void hadamard_avx512(void *share, int64_t chunk) { hadamard_rows(share, chunk); }
FOR_AVX512 static void silu_multiply_avx512(void *share, int64_t chunk) { silu_multiply_rows(share, chunk); }
#endif
static const PoolTask ADD_NORM[NUM_INSTRUCTION_SETS] = BY_SET(add_norm);
static const PoolTask ROTATE[NUM_INSTRUCTION_SETS] = BY_SET(rotate);
static const PoolTask HADAMARD[NUM_INSTRUCTION_SETS] = BY_SET(hadamard);
static const PoolTask SILU_MULTIPLY[NUM_INSTRUCTION_SETS] = BY_SET(silu_multiply);

int add_norm(const AddNorm *job, int instruction_set) {
    return run(ADD_NORM, job, job->rows, job->size, instruction_set);
}

int rotate(const Rotate *job, int instruction_set) {
    return run(ROTATE, job, job->rows, job->heads * job->head_dim, instruction_set);
}

int hadamard(const Hadamard *job, int instruction_set) {
    return run(HADAMARD, job, job->rows, job->heads * job->head_dim, instruction_set);
}

int silu_multiply(const SiluMultiply *job, int instruction_set) {
    return run(SILU_MULTIPLY, job, job->rows, job->size, instruction_set);
}
