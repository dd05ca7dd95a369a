/* Parts of a step of a layer with a state, and numbers of activations. Inlined into functions of each instruction set. */
#ifndef NATIVE_STATE_PARTS_H
#define NATIVE_STATE_PARTS_H

#include <math.h>

#include "common/bf16.h"
#include "common/thread_pool.h"
#include "state/state.h"

enum { ENOUGH = 1 << 14 }; /* numbers that are worth waking a thread for */

/* Which units a chunk of the pool's has. */
typedef struct {
    const StateStep *job;
    int64_t units, per_chunk;
} Share;

INLINE int64_t last_unit(const Share *share, int64_t chunk) {
    const int64_t stop = (chunk + 1) * share->per_chunk;
    return stop < share->units ? stop : share->units;
}

/* Runs a task over units of about `size` numbers each. */
static inline void run_units(PoolTask task, const StateStep *job, int64_t units, int64_t size) {
    Share share = {job, units, size < ENOUGH ? ENOUGH / size : 1};
    pool_run(task, &share, (units + share.per_chunk - 1) / share.per_chunk);
}

INLINE Lanes load_activations(const void *from, int64_t at, int is_wide) {
    return is_wide ? lanes_load((const float *)from + at) : lanes_load_bfloat16((const uint16_t *)from + at);
}

INLINE float load_activation(const void *from, int64_t at, int is_wide) {
    return is_wide ? ((const float *)from)[at] : float_of_bfloat16(((const uint16_t *)from)[at]);
}

INLINE void store_activations(void *to, int64_t at, Lanes x, int is_wide) {
    if (is_wide)
        lanes_store((float *)to + at, x);
    else
        lanes_store_bfloat16((uint16_t *)to + at, x);
}

INLINE Lanes round_activations(Lanes x, int is_wide) { return is_wide ? x : lanes_round_bfloat16(x); }

INLINE Lanes lanes_silu(Lanes x) { return x * lanes_sigmoid(x); }

void convolve_rows(const StateStep *job, int set);
void scan_rows(const StateStep *job, int set);
void gate_rows(const StateStep *job, int set);

/* Compiles a task for every instruction set, as the table `name_tasks`. */
#define TASKS_OF(name)                                                                                             \
    static void name##_scalar(void *share, int64_t chunk) { name(share, chunk); }                                  \
    TASKS_ON_X86(name)                                                                                             \
    static const PoolTask name##_tasks[NUM_INSTRUCTION_SETS] = BY_SET(name);
#if ON_X86
#define TASKS_ON_X86(name)                                                                                         \
    FOR_AVX2 static void name##_avx2(void *share, int64_t chunk) { name(share, chunk); }                           \
    FOR_AVX512 static void name##_avx512(void *share, int64_t chunk) { name(share, chunk); }
#else
#define TASKS_ON_X86(name)
#endif

#endif
