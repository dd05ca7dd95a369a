/* Log-probabilities of tokens, and the most likely ones. */
#include "sampling/sampling.h"

#include "common/thread_pool.h"
#include "sampling/row.h"

typedef struct {
    int64_t count, size;
    int64_t *ids;
    float *scores;
} Top;

/* Tokens come in the order of their ids: of equal scores the earlier stays in front. */
INLINE void insert(Top *top, int64_t token, float score) {
    int64_t place = top->count < top->size ? top->count++ : top->size - 1;
    for (; place > 0 && top->scores[place - 1] < score; place--) {
        top->ids[place] = top->ids[place - 1];
        top->scores[place] = top->scores[place - 1];
    }
    top->ids[place] = token, top->scores[place] = score;
}

INLINE void find_top(const Row *row, Top *top) {
    float least = kth_score(row, top->size);
    for (int64_t block = 0; block < row->blocks; block++) {
        if (row->peaks[block] < least) continue;
        const int64_t first = block * BLOCK, stop = first + in_block(row, block);
        for (int64_t i = first; i < stop; i++) {
            const float score = row->scores[i];
            if (score > least || (score == least && top->count < top->size)) insert(top, i, score);
        }
    }
}

INLINE int is_below_infinity(const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(x[i] <= FLT_MAX)) return 0;
    return 1;
}

INLINE void find_logprobs(Row *row, const LogprobRows *job, int64_t number) {
    const float *logits = job->logits + number * job->vocab;
    Top top = {0, job->num_top, job->top_ids + number * job->num_top, job->top + number * job->num_top};
    const int is_finite = row->scores && fill_row(row, logits, NULL, 0, 1);
    double total = NAN;
    if (is_finite || (row->scores && is_below_infinity(logits, job->vocab))) {
        total = (double)row->highest + log(mass_from(row, -FLT_MAX));
        if (top.size) find_top(row, &top);
    }
    for (; top.count < top.size; top.count++) top.ids[top.count] = top.count;
    for (int64_t i = 0; i < top.size; i++) top.scores[i] = (float)((double)logits[top.ids[i]] - total);
    job->chosen[number] = (float)((double)logits[job->token_ids[number]] - total);
}

INLINE void logprobs_of(void *context, int64_t number) {
    const LogprobRows *job = context;
    Row row = make_row(job->vocab);
    find_logprobs(&row, job, number);
    free_row(&row);
}

static void logprobs_scalar(void *job, int64_t row) { logprobs_of(job, row); }
#if ON_X86
FOR_AVX2 static void logprobs_avx2(void *job, int64_t row) { logprobs_of(job, row); }
FOR_AVX512 static void logprobs_avx512(void *job, int64_t row) { logprobs_of(job, row); }
#endif
static const PoolTask LOGPROBS[NUM_INSTRUCTION_SETS] = BY_SET(logprobs);

int logprob_rows(const LogprobRows *job, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    pool_run(LOGPROBS[set], (void *)job, job->rows);
    return 0;
}
