/* One token for each row. */
#include "sampling/sampling.h"

#include "common/thread_pool.h"
#include "sampling/row.h"

static const uint64_t GAMMA = 0x9E3779B97F4A7C15;

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

INLINE void hear_token(Found *found, int64_t token, double sum) {
    if (sum > found->best) found->second = found->best, found->best = sum, found->winner = token;
    else if (sum > found->second) found->second = sum;
}

/* Sums that may win, among scores of one block that are not below `least`; `state` is that of its first token. */
INLINE void hear_block(const Row *row, int64_t block, float least, uint64_t state, Found *found) {
    const float *scores = row->scores + block * BLOCK;
    int32_t rest[BLOCK], loud[BLOCK];
    for (int64_t i = 0; i < BLOCK; i++) rest[i] = (int32_t)(~mix(state + (uint64_t)i * GAMMA) >> 40);
    /* less than the best sum, by more than the rounding of bounds */
    const Lanes threshold = lanes_of((float)(found->best - 1e-3 - 1e-6 * fabs(found->best)));
    IntLanes any = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        const IntLanes here = lanes_below(threshold, bound(scores + i, rest + i));
        memcpy(loud + i, &here, sizeof here);
        any |= here;
    }
    int32_t some = 0;
    for (int lane = 0; lane < LANES; lane++) some |= any[lane];
    for (int64_t i = 0; some && i < BLOCK; i++)
        if (loud[i] && scores[i] >= least)
            hear_token(found, block * BLOCK + i, (double)scores[i] + gumbel(mix(state + (uint64_t)i * GAMMA)));
}

/* The highest sum of score and noise, among scores that are not below `least`. */
INLINE Found loudest(const Row *row, float least, int64_t seed, int64_t position) {
    const uint64_t first = mix(mix((uint64_t)seed + GAMMA) ^ ((uint64_t)position + 1) * GAMMA) + GAMMA;
    Found found = {-INFINITY, -INFINITY, UNDECIDED};
    for (int64_t block = 0; block < row->blocks; block++)
        if (row->peaks[block] >= least) hear_block(row, block, least, first + (uint64_t)(block * BLOCK) * GAMMA, &found);
    return found;
}

/* Sums of another implementation's logarithms are ordered alike if they are further apart than this. */
INLINE int is_certain(const Found *found) { return found->best - found->second > 1e-9 + 1e-12 * fabs(found->best); }

/* The next float; numbers that compare like zero where denormals are flushed are one. */
static float next_above(float x) { return fabsf(x) < 1e-30f ? 1e-30f : nextafterf(x, INFINITY); }

/* Conditions of a drawn token beside top-k. Bounds are those of PyTorch's float32 up to a doubt. */
typedef struct {
    float top_p;
    double total, mass_doubt;  /* sum of e^(score - highest) that top-p is a share of; doubt of a share */
    double limit, limit_doubt; /* least score that min-p allows */
} Limits;

INLINE Limits find_limits(const Row *row, float least, float top_p, float min_p) {
    Limits limits = {.top_p = top_p, .limit = -INFINITY};
    const double highest = fabs((double)row->highest);
    if (top_p < 1) {
        limits.total = mass_from(row, least);
        limits.mass_doubt = 1e-6 * (highest + log(limits.total) + 16);
    }
    if (min_p > 0) {
        limits.limit = (double)row->highest + log((double)min_p);
        limits.limit_doubt = 1e-6 * (highest - log((double)min_p) + 1);
    }
    return limits;
}

enum { OUTSIDE, INSIDE, IN_DOUBT };

INLINE int judge(const Row *row, const Limits *limits, float score) {
    if (score == row->highest) return INSIDE;
    if (limits->top_p < 1) {
        const double excess = mass_from(row, next_above(score)) / limits->total - (double)limits->top_p;
        if (excess >= limits->mass_doubt) return OUTSIDE;
        if (excess > -limits->mass_doubt) return IN_DOUBT;
    }
    return (double)score < limits->limit + limits->limit_doubt ? IN_DOUBT : INSIDE;
}

/* The winner among all tokens is the winner among those that truncation keeps, if it is kept. If not, neither are those
 * with lower scores, and the others draw again: with top-p on average 1 - ln p times. */
INLINE int64_t draw(const Row *row, const SampledRows *job, int64_t number) {
    const int64_t k = job->top_k[number];
    float least = k > 0 && k <= row->vocab ? fmaxf(kth_score(row, k), -FLT_MAX) : -FLT_MAX;
    const Limits limits = find_limits(row, least, (float)job->top_p[number], (float)job->min_p[number]);
    least = fmaxf(least, (float)(limits.limit - limits.limit_doubt));
    for (;;) {
        const Found found = loudest(row, least, job->seeds[number], job->positions[number]);
        if (found.winner < 0) return UNDECIDED;
        const float score = row->scores[found.winner];
        const int verdict = judge(row, &limits, score);
        if (verdict != OUTSIDE) return verdict == INSIDE && is_certain(&found) ? found.winner : UNDECIDED;
        least = next_above(score);
    }
}

INLINE int64_t first_highest(const Row *row) {
    int64_t block = 0;
    while (row->peaks[block] != row->highest) block++;
    int64_t token = block * BLOCK;
    while (row->scores[token] != row->highest) token++;
    return token;
}

INLINE int is_token(const Row *row, int64_t id) { return (uint64_t)id < (uint64_t)row->vocab; }

INLINE float penalized(float x, float count, float repetition, float frequency, float presence) {
    x = x > 0 ? x / repetition : x * repetition;
    x -= count * frequency;
    return count > 0 ? x - presence : x;
}

/* Applies penalties to tokens in the history. The room holds how often each is there: one where it is in the prompt, two
 * more for each time in the output. */
INLINE void penalize(Row *row, const Adjustment *change) {
    const float repetition = (float)change->repetition;
    const float frequency = (float)change->frequency, presence = (float)change->presence;
    const int64_t length = change->num_prompt + change->num_output;
    int32_t *seen = memset(row->room, 0, (size_t)row->vocab * sizeof *seen);
    for (int64_t i = 0; i < length; i++) {
        const int64_t token = change->history[i];
        if (is_token(row, token)) seen[token] = i < change->num_prompt ? 1 : seen[token] + 2;
    }
    for (int64_t i = 0; i < length; i++) {
        const int64_t token = change->history[i];
        if (!is_token(row, token) || !seen[token]) continue;
        row->scores[token] = penalized(row->scores[token], (float)(seen[token] >> 1), repetition, frequency, presence);
        seen[token] = 0;
    }
}

INLINE void adjust(Row *row, const Adjustment *change) {
    for (int64_t i = 0; i < change->num_biases; i++)
        if (is_token(row, change->bias_ids[i])) row->scores[change->bias_ids[i]] += (float)change->biases[i];
    if (change->num_prompt + change->num_output) penalize(row, change);
}

/* Whether a row has changes that are not those of the mask. */
INLINE int changes_scores(const Adjustment *change) {
    return change && change->num_biases + change->num_prompt + change->num_output > 0;
}

INLINE int64_t sample_row(Row *row, const SampledRows *job, int64_t number) {
    const float *logits = job->logits + number * job->vocab;
    const Adjustment *change = job->adjustments ? &job->adjustments[number] : NULL;
    const float temperature = (float)job->temperature[number], divisor = temperature > 0 ? temperature : 1;
    const uint8_t *mask = change ? change->mask : NULL;
    const int64_t mask_bytes = change ? change->mask_bytes : 0;
    if (changes_scores(change)) {
        if (!fill_row(row, logits, NULL, 0, 1)) return NOT_FINITE;
        adjust(row, change);
        fill_row(row, row->scores, mask, mask_bytes, divisor);
    } else if (!fill_row(row, logits, mask, mask_bytes, divisor)) {
        return NOT_FINITE;
    }
    if (row->highest == -INFINITY) return FORBIDDEN;
    if (temperature == 0) return first_highest(row);
    return row->highest <= FLT_MAX ? draw(row, job, number) : UNDECIDED;
}

INLINE void sample_number(void *context, int64_t number) {
    const SampledRows *job = context;
    Row row = make_row(job->vocab);
    job->tokens[number] = row.scores ? sample_row(&row, job, number) : UNDECIDED;
    free_row(&row);
}

static void sample_scalar(void *job, int64_t row) { sample_number(job, row); }
#if ON_X86
FOR_AVX2 static void sample_avx2(void *job, int64_t row) { sample_number(job, row); }
FOR_AVX512 static void sample_avx512(void *job, int64_t row) { sample_number(job, row); }
#endif
static const PoolTask SAMPLE[NUM_INSTRUCTION_SETS] = BY_SET(sample);

int sample_rows(const SampledRows *job, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    pool_run(SAMPLE[set], (void *)job, job->rows);
    return 0;
}
