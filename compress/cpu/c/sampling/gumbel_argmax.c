/* The highest sum of score and noise. */
#include "sampling/sampling.h"

#include <math.h>

#include "common/simd.h"
#include "common/thread_pool.h"

enum { BLOCK = 4 * LANES };

static const uint64_t GAMMA = 0x9E3779B97F4A7C15;

/* `count` scores, and minus infinity behind them. */
INLINE void load_block(const float *scores, int64_t count, float *block) {
    for (int64_t i = count; i < BLOCK; i++) block[i] = -INFINITY;
    memcpy(block, scores, (size_t)count * sizeof *block);
}

/* SplitMix64's finalizer. */
INLINE uint64_t mix(uint64_t word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
    word = (word ^ word >> 27) * 0x94D049BB133111EB;
    return word ^ word >> 31;
}

NOINLINE double gumbel(uint64_t word) {
    const double uniform = ((double)(word >> 12) + 0.5) * 0x1p-52;
    return -log(-log(uniform));
}

/* Not below any sum of a score and the noise of `word`, up to rounding: with uniform u it is -ln(-ln u), and
 * -ln u >= 1 - u >= rest / 2^24. The bits of a float, as a number, are 2^23 times a bound of its binary logarithm. */
INLINE Lanes bound(const float *scores, const int32_t *rest) {
    IntLanes whole;
    memcpy(&whole, rest, sizeof whole);
    const IntLanes bits = (IntLanes)__builtin_convertvector(whole, Lanes);
    const Lanes logarithm = __builtin_convertvector(bits, Lanes) * lanes_of(0x1p-23f) - lanes_of(127 + 24);
    return lanes_load(scores) - logarithm * lanes_of(0.693147181f);
}

typedef struct {
    double best, second;
    int64_t winner;
} Found;

INLINE void hear_block(const float *scores, uint64_t state, int64_t first, const int32_t *loud, Found *found) {
    for (int64_t i = 0; i < BLOCK; i++) {
        if (!loud[i]) continue;
        const double sum = (double)scores[i] + gumbel(mix(state + (uint64_t)i * GAMMA));
        if (sum > found->best) {
            found->second = found->best, found->best = sum, found->winner = first + i;
        } else if (sum > found->second) {
            found->second = sum;
        }
    }
}

/* Threshold of the bounds: less than the best sum, by more than the rounding of bounds. */
INLINE float least_bound(double best) { return (float)(best - 1e-3 - 1e-6 * fabs(best)); }

/* Sums of another implementation's logarithms are ordered alike if they are further apart than this. */
INLINE int is_certain(const Found *found) { return found->best - found->second > 1e-9 + 1e-12 * fabs(found->best); }

INLINE void winner_of_row(void *context, int64_t row) {
    const NoisyRows *job = context;
    const float *scores = job->scores + row * job->vocab;
    uint64_t state = mix(mix((uint64_t)job->seeds[row] + GAMMA) ^ ((uint64_t)job->positions[row] + 1) * GAMMA) + GAMMA;
    Found found = {-INFINITY, -INFINITY, -1};
    for (int64_t first = 0; first < job->vocab; first += BLOCK, state += BLOCK * GAMMA) {
        float end[BLOCK];
        const float *block = scores + first;
        if (job->vocab - first < BLOCK) {
            load_block(block, job->vocab - first, end);
            block = end;
        }
        int32_t rest[BLOCK], loud[BLOCK];
        for (int64_t i = 0; i < BLOCK; i++) rest[i] = (int32_t)(~mix(state + (uint64_t)i * GAMMA) >> 40);
        const Lanes least = lanes_of(least_bound(found.best));
        IntLanes any = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            const IntLanes here = lanes_below(least, bound(block + i, rest + i));
            memcpy(loud + i, &here, sizeof here);
            any |= here;
        }
        int32_t some = 0;
        for (int lane = 0; lane < LANES; lane++) some |= any[lane];
        if (some) hear_block(block, state, first, loud, &found);
    }
    job->winners[row] = is_certain(&found) ? found.winner : -1;
}

static void winners_scalar(void *job, int64_t row) { winner_of_row(job, row); }
#if ON_X86
FOR_AVX2 static void winners_avx2(void *job, int64_t row) { winner_of_row(job, row); }
FOR_AVX512 static void winners_avx512(void *job, int64_t row) { winner_of_row(job, row); }
#endif
static const PoolTask WINNERS[NUM_INSTRUCTION_SETS] = BY_SET(winners);

int gumbel_argmax_rows(const NoisyRows *job, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    pool_run(WINNERS[set], (void *)job, job->rows);
    return 0;
}
