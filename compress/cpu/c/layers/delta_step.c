#include "layers/delta_step.h"

#include "common/simd.h"
#include "common/thread_pool.h"

enum { WIDE = 4 }; /* lanes side by side: their columns of a state stay in the first cache between both passes */

/* `width * LANES` columns of the state of one head of one sequence. */
INLINE void delta_columns(const DeltaStep *job, int64_t head, const float *from, float *to, int64_t column, int width) {
    const int64_t keys = job->key_dim, values = job->value_dim;
    const float *query = job->query + head * keys, *key = job->key + head * keys;
    const Lanes factor = lanes_of(job->factor[head]), beta = lanes_of(job->beta[head]);
    Lanes update[WIDE], out[WIDE];
    for (int i = 0; i < width; i++) update[i] = out[i] = lanes_of(0.0f);
    for (int64_t k = 0; k < keys; k++)
        for (int i = 0; i < width; i++)
            update[i] += lanes_of(key[k]) * lanes_load(from + k * values + column + i * LANES);
    for (int i = 0; i < width; i++)
        update[i] = beta * (lanes_load(job->value + head * values + column + i * LANES) - factor * update[i]);
    for (int64_t k = 0; k < keys; k++)
        for (int i = 0; i < width; i++) {
            const int64_t at = k * values + column + i * LANES;
            const Lanes next = factor * lanes_load(from + at) + lanes_of(key[k]) * update[i];
            lanes_store(to + at, next);
            out[i] += lanes_of(query[k]) * next;
        }
    for (int i = 0; i < width; i++) lanes_store(job->out + head * values + column + i * LANES, out[i]);
}

INLINE void delta_head(void *context, int64_t chunk) {
    const DeltaStep *job = context;
    const int64_t sequence = chunk / job->heads, size = job->key_dim * job->value_dim;
    const int64_t head = chunk % job->heads;
    const float *from = job->states + (job->reads[sequence] * job->heads + head) * size;
    float *to = job->states + (job->writes[sequence] * job->heads + head) * size;
    int64_t column = 0;
    for (; column + WIDE * LANES <= job->value_dim; column += WIDE * LANES)
        delta_columns(job, chunk, from, to, column, WIDE);
    for (; column < job->value_dim; column += LANES) delta_columns(job, chunk, from, to, column, 1);
}

static void delta_scalar(void *job, int64_t chunk) { delta_head(job, chunk); }
#if ON_X86
FOR_AVX2 static void delta_avx2(void *job, int64_t chunk) { delta_head(job, chunk); }
FOR_AVX512 static void delta_avx512(void *job, int64_t chunk) { delta_head(job, chunk); }
#endif
static const PoolTask DELTA[NUM_INSTRUCTION_SETS] = BY_SET(delta);

int delta_step(const DeltaStep *job, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    DeltaStep copy = *job;
    pool_run(DELTA[set], &copy, job->sequences * job->heads);
    return 0;
}
