#include "layers/norm_rope_act.h"

#include <float.h>

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
        uint16_t *out = job->out + row * job->size;
        if (job->wide)
            normalize_wide(hidden, job->wide, job->size, job->eps, out);
        else
            normalize(hidden, job->weight, job->size, job->eps, out);
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

/* x * sigmoid(y); e^-|y| cannot overflow. */
INLINE Lanes lanes_gate(Lanes x, Lanes y) {
    const IntLanes negative = lanes_negative((IntLanes)y);
    const Lanes small = lanes_exp(lanes_select(negative, y, -y)), one = lanes_of(1.0f);
    return x * lanes_select(negative, small, one) / (one + small);
}

/* 0.5 * x * (1 + tanh(y)) is x * sigmoid(2 * y), which is 0 or x beyond 87. */
INLINE Lanes lanes_gelu_tanh(Lanes x) {
    const Lanes y = x * (lanes_of(1.5957691f) + x * x * lanes_of(0.071354814f));
    return lanes_gate(x, lanes_clamp(y, -87.0f, 87.0f));
}

INLINE Lanes clamp_numbers(Lanes x, float low, float high) {
    return lanes_select(lanes_nan(x), x, lanes_clamp(x, low, high));
}

/* Rounded after every operation, as transformers does. */
INLINE Lanes lanes_clamped_gate(const Activation *activation, Lanes gate, Lanes up) {
    gate = clamp_numbers(gate, -FLT_MAX, activation->limit);
    up = clamp_numbers(up, -activation->limit, activation->limit);
    const Lanes open = lanes_sigmoid(lanes_round_bfloat16(gate * lanes_of(activation->alpha)));
    return lanes_round_bfloat16(lanes_round_bfloat16(open) * gate) * lanes_round_bfloat16(up + lanes_of(1.0f));
}

INLINE void activate_and_mul_row(const ActivateMultiply *job, int64_t row, const ActivationKind kind) {
    const uint16_t *gates = job->gate_up + 2 * row * job->size, *ups = gates + job->size;
    for (int64_t i = 0; i < job->size; i += LANES) {
        const Lanes gate = lanes_load_bfloat16(gates + i), up = lanes_load_bfloat16(ups + i);
        const Lanes found = kind == CLAMPED ? lanes_clamped_gate(&job->activation, gate, up)
                            : kind == SILU  ? lanes_round_bfloat16(lanes_gate(gate, gate)) * up
                                            : lanes_round_bfloat16(lanes_gelu_tanh(gate)) * up;
        lanes_store_bfloat16(job->out + row * job->size + i, found);
    }
}

INLINE void activate_and_mul_rows(void *context, int64_t chunk) {
    const Share *share = context;
    const ActivateMultiply *job = share->job;
    for (int64_t row = first_row(share, chunk); row < last_row(share, chunk); row++)
        switch (job->activation.kind) {
        case SILU: activate_and_mul_row(job, row, SILU); break;
        case GELU_TANH: activate_and_mul_row(job, row, GELU_TANH); break;
        default: activate_and_mul_row(job, row, CLAMPED);
        }
}

static void add_rms_norm_scalar(void *share, int64_t chunk) { add_rms_norm_rows(share, chunk); }
static void rotate_scalar(void *share, int64_t chunk) { rotate_rows(share, chunk); }
static void activate_and_mul_scalar(void *share, int64_t chunk) { activate_and_mul_rows(share, chunk); }
#if ON_X86
FOR_AVX2 static void add_rms_norm_avx2(void *share, int64_t chunk) { add_rms_norm_rows(share, chunk); }
FOR_AVX2 static void rotate_avx2(void *share, int64_t chunk) { rotate_rows(share, chunk); }
FOR_AVX2 static void activate_and_mul_avx2(void *share, int64_t chunk) { activate_and_mul_rows(share, chunk); }
FOR_AVX512 static void add_rms_norm_avx512(void *share, int64_t chunk) { add_rms_norm_rows(share, chunk); }
FOR_AVX512 static void rotate_avx512(void *share, int64_t chunk) { rotate_rows(share, chunk); }
FOR_AVX512 static void activate_and_mul_avx512(void *share, int64_t chunk) { activate_and_mul_rows(share, chunk); }
#endif
static const PoolTask ADD_NORM[NUM_INSTRUCTION_SETS] = BY_SET(add_rms_norm);
static const PoolTask ROTATE[NUM_INSTRUCTION_SETS] = BY_SET(rotate);
static const PoolTask ACTIVATE_MULTIPLY[NUM_INSTRUCTION_SETS] = BY_SET(activate_and_mul);

int add_rms_norm(const AddNorm *job, int instruction_set) {
    return run(ADD_NORM, job, job->rows, job->size, instruction_set);
}

int rotate(const Rotate *job, int instruction_set) {
    return run(ROTATE, job, job->rows, job->heads * job->head_dim, instruction_set);
}

int activate_and_mul(const ActivateMultiply *job, int instruction_set) {
    return run(ACTIVATE_MULTIPLY, job, job->rows, job->size, instruction_set);
}
