/* Samples and scores rows with every instruction set on buffers of exactly their size, and compares with the definitions in
 * double, one token at a time. Built with sanitizers, and for ARM, by test_sanitizers.py. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/thread_pool.h"
#include "sampling/sampling.h"
#include "driver.h"

enum { CASES = 400, MOST_TOKENS = 400, MOST_UNDECIDED = 8, MOST_TOP = 20 };

static double *doubles(int64_t count, const double *values, int64_t number) {
    double *x = exactly(count * 8);
    for (int64_t i = 0; i < count; i++) x[i] = values[draw(number)];
    return x;
}

static int64_t *integers(int64_t count, int64_t below) {
    int64_t *x = exactly(count * 8);
    for (int64_t i = 0; i < count; i++) x[i] = draw(below);
    return x;
}

static uint64_t mix(uint64_t word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
    word = (word ^ word >> 27) * 0x94D049BB133111EB;
    return word ^ word >> 31;
}

static double noise(int64_t seed, int64_t position, int64_t token) {
    const uint64_t gamma = 0x9E3779B97F4A7C15;
    const uint64_t stream = mix(mix((uint64_t)seed + gamma) ^ ((uint64_t)position + 1) * gamma);
    const double uniform = ((double)(mix(stream + ((uint64_t)token + 1) * gamma) >> 12) + 0.5) * 0x1p-52;
    return -log(-log(uniform));
}

static int occurs(const int64_t *tokens, int64_t count, int64_t token) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found += tokens[i] == token;
    return found;
}

static float adjusted(float x, const Adjustment *change, int64_t token) {
    for (int64_t i = 0; i < change->num_biases; i++)
        if (change->bias_ids[i] == token) x += (float)change->biases[i];
    const int count = occurs(change->history + change->num_prompt, change->num_output, token);
    if (count || occurs(change->history, change->num_prompt, token)) {
        x = x > 0 ? x / (float)change->repetition : x * (float)change->repetition;
        x -= (float)count * (float)change->frequency;
        if (count) x -= (float)change->presence;
    }
    const int allowed = !change->mask || (token / 8 < change->mask_bytes && change->mask[token / 8] >> token % 8 & 1);
    return allowed ? x : -INFINITY;
}

/* Whether truncation keeps a token of finite score. */
static int is_kept(const SampledRows *job, int64_t row, const float *scores, int64_t token) {
    const int64_t k = job->top_k[row];
    double total = 0, above = 0, highest = -INFINITY;
    for (int64_t i = 0; i < job->vocab; i++) highest = fmax(highest, (double)scores[i]);
    for (int64_t i = 0; i < job->vocab; i++) {
        int64_t better = 0;
        for (int64_t j = 0; k > 0 && j < job->vocab; j++) better += scores[j] > scores[i];
        if (k > 0 && better >= k) {
            if (i == token) return 0;
            continue;
        }
        const double mass = exp((double)scores[i] - highest);
        total += mass;
        if (scores[i] > scores[token]) above += mass;
    }
    if (job->top_p[row] < 1 && above > 0 && above / total >= job->top_p[row]) return 0;
    return job->min_p[row] == 0 || (double)scores[token] >= highest + log(job->min_p[row]);
}

static int64_t expected(const SampledRows *job, int64_t row) {
    float scores[MOST_TOKENS];
    int64_t winner = FORBIDDEN;
    double best = -INFINITY;
    for (int64_t i = 0; i < job->vocab; i++) {
        scores[i] = job->logits[row * job->vocab + i];
        if (!isfinite(scores[i])) return NOT_FINITE;
        if (job->adjustments) scores[i] = adjusted(scores[i], &job->adjustments[row], i);
        if (job->temperature[row] > 0) scores[i] /= (float)job->temperature[row];
    }
    for (int64_t i = 0; i < job->vocab; i++) {
        const double sum = (double)scores[i] + (job->temperature[row] > 0 ? noise(job->seeds[row], job->positions[row], i) : 0);
        if (sum > best && (job->temperature[row] == 0 || is_kept(job, row, scores, i))) best = sum, winner = i;
    }
    return winner;
}

static int are_tokens_right(const SampledRows *job, int *undecided) {
    for (int64_t row = 0; row < job->rows; row++) {
        const int64_t found = job->tokens[row], wanted = expected(job, row);
        *undecided += found == UNDECIDED;
        if (found != wanted && (found != UNDECIDED || wanted < 0)) return 0;
    }
    return 1;
}

static int are_scores_right(const LogprobRows *job) {
    for (int64_t row = 0; row < job->rows; row++) {
        const float *logits = job->logits + row * job->vocab, *top = job->top + row * job->num_top;
        const int64_t *ids = job->top_ids + row * job->num_top;
        double sum = 0;
        for (int64_t i = 0; i < job->vocab; i++) sum += exp((double)logits[i]);
        if (!isfinite(sum)) continue;
        if (fabs((double)job->chosen[row] - ((double)logits[job->token_ids[row]] - log(sum))) > 1e-6) return 0;
        for (int64_t i = 0; i < job->num_top; i++) {
            int64_t before = 0;
            for (int64_t j = 0; j < job->vocab; j++)
                before += logits[j] > logits[ids[i]] || (logits[j] == logits[ids[i]] && j < ids[i]);
            if (before != i || fabs((double)top[i] - ((double)logits[ids[i]] - log(sum))) > 1e-6) return 0;
        }
    }
    return 1;
}

static void draw_changes(Adjustment *change, uint8_t *mask, int64_t bytes, int64_t *ids, double *biases, int64_t *text, int64_t length) {
    const int64_t prompt = draw(length + 1);
    *change = (Adjustment){draw(2) ? mask : NULL, bytes, ids, biases, draw(4), text, prompt, length - prompt, 1.3, 0.5, 0.2};
}

static int run_case(int set, int *undecided) {
    static const double temperatures[] = {0, 0.5, 1, 3}, shares[] = {1, 0.9, 0.3131}, least[] = {0, 0.0721}, values[] = {2, -1};
    const int64_t rows = 1 + draw(4), vocab = 1 + draw(MOST_TOKENS), length = draw(40), bytes = 1 + draw(60);
    float *logits = exactly(rows * vocab * 4), *chosen = exactly(rows * 4), *top = exactly(rows * MOST_TOP * 4);
    for (int64_t i = 0; i < rows * vocab; i++) logits[i] = (float)(draw(401) - 200) / 50; /* with ties */
    if (!draw(4)) logits[draw(rows * vocab)] = draw(2) ? NAN : -INFINITY;
    int64_t *seeds = integers(rows, 1000), *positions = integers(rows, 1000), *top_k = integers(rows, 2 + draw(30));
    int64_t *tokens = exactly(rows * 8), *ids = exactly(rows * MOST_TOP * 8);
    int64_t *text = integers(length, vocab + 3), *bias_ids = integers(3, vocab + 3);
    double *temperature = doubles(rows, temperatures, 4), *top_p = doubles(rows, shares, 3), *min_p = doubles(rows, least, 2);
    double *biases = doubles(3, values, 2);
    uint8_t *mask = memset(exactly(bytes), 0xb5, (size_t)bytes);
    Adjustment *changes = exactly(rows * (int64_t)sizeof *changes);
    for (int64_t i = 0; i < rows; i++) draw_changes(&changes[i], mask, bytes, bias_ids, biases, text, length);
    const SampledRows job = {rows, vocab, logits, seeds, positions, top_k, temperature, top_p, min_p, draw(2) ? changes : NULL, tokens};
    int wrong = sample_rows(&job, set) ? FAILED_STATUS : are_tokens_right(&job, undecided) ? 0 : FAILED_NUMBERS;
    for (int64_t i = 0; i < rows; i++) tokens[i] = draw(vocab);
    const LogprobRows scored = {rows, vocab, draw((vocab < MOST_TOP ? vocab : MOST_TOP) + 1), logits, tokens, chosen, ids, top};
    if (!wrong) wrong = logprob_rows(&scored, set) ? FAILED_STATUS : are_scores_right(&scored) ? 0 : FAILED_NUMBERS;
    free(logits), free(chosen), free(top), free(seeds), free(positions), free(top_k), free(tokens), free(ids), free(text);
    free(bias_ids), free(temperature), free(top_p), free(min_p), free(biases), free(mask), free(changes);
    return wrong;
}

int main(void) {
    int wrong = 0, undecided = 0;
    pool_set_threads(3);
    for (int i = 0; !wrong && i < CASES; i++) {
        wrong = run_case(i % (native_best_instruction_set() + 1), &undecided);
        if (wrong) fprintf(stderr, "case %d failed: %d\n", i, wrong);
    }
    if (undecided > MOST_UNDECIDED) fprintf(stderr, "%d rows were left undecided\n", undecided);
    return wrong ? wrong : undecided > MOST_UNDECIDED ? FAILED_NUMBERS : 0;
}
