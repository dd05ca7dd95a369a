#include "layers/norm_rope_act.h"

#include "layers/heads.h"
#include "common/thread_pool.h"

enum { CHUNK = 1 << 14 }; /* elements that are worth waking a thread for */

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

INLINE void add_rms_norm_rows(void *context, int64_t chunk) {
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

INLINE void silu_and_mul_rows(void *context, int64_t chunk) {
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

static void add_rms_norm_scalar(void *share, int64_t chunk) { add_rms_norm_rows(share, chunk); }
static void rotate_scalar(void *share, int64_t chunk) { rotate_rows(share, chunk); }
static void silu_and_mul_scalar(void *share, int64_t chunk) { silu_and_mul_rows(share, chunk); }
#if ON_X86
FOR_AVX2 static void add_rms_norm_avx2(void *share, int64_t chunk) { add_rms_norm_rows(share, chunk); }
FOR_AVX2 static void rotate_avx2(void *share, int64_t chunk) { rotate_rows(share, chunk); }
FOR_AVX2 static void silu_and_mul_avx2(void *share, int64_t chunk) { silu_and_mul_rows(share, chunk); }
FOR_AVX512 static void add_rms_norm_avx512(void *share, int64_t chunk) { add_rms_norm_rows(share, chunk); }
FOR_AVX512 static void rotate_avx512(void *share, int64_t chunk) { rotate_rows(share, chunk); }
FOR_AVX512 static void silu_and_mul_avx512(void *share, int64_t chunk) { silu_and_mul_rows(share, chunk); }
#endif
static const PoolTask ADD_NORM[NUM_INSTRUCTION_SETS] = BY_SET(add_rms_norm);
static const PoolTask ROTATE[NUM_INSTRUCTION_SETS] = BY_SET(rotate);
static const PoolTask SILU_MULTIPLY[NUM_INSTRUCTION_SETS] = BY_SET(silu_and_mul);

int add_rms_norm(const AddNorm *job, int instruction_set) {
    return run(ADD_NORM, job, job->rows, job->size, instruction_set);
}

int rotate(const Rotate *job, int instruction_set) {
    return run(ROTATE, job, job->rows, job->heads * job->head_dim, instruction_set);
}

int silu_and_mul(const SiluMultiply *job, int instruction_set) {
    return run(SILU_MULTIPLY, job, job->rows, job->size, instruction_set);
}
