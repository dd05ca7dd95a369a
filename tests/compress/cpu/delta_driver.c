/* Runs the step of the gated delta rule with every instruction set against sums in double; for sanitizers and emulators. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers/delta_step.h"
#include "common/thread_pool.h"

enum { SEQUENCES = 3, HEADS = 2, KEYS = 5, SLOTS = 5, MOST_VALUES = 80 };

static float random_number(void) { return (float)rand() / (float)RAND_MAX - 0.5f; }

static void fill(float *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = random_number();
}

/* The largest difference of a head's outputs and of its new state. */
static double head_error(const DeltaStep *job, const float *before, int64_t row, int64_t head) {
    const int64_t values = job->value_dim, size = KEYS * values, at = row * HEADS + head;
    const float *from = before + (job->reads[row] * HEADS + head) * size;
    const float *to = job->states + (job->writes[row] * HEADS + head) * size;
    double worst = 0.0;
    for (int64_t v = 0; v < values; v++) {
        double kept = 0.0, out = 0.0;
        for (int64_t k = 0; k < KEYS; k++) kept += (double)job->key[at * KEYS + k] * job->factor[at] * from[k * values + v];
        const double update = job->beta[at] * (job->value[at * values + v] - kept);
        for (int64_t k = 0; k < KEYS; k++) {
            const double next = (double)job->factor[at] * from[k * values + v] + job->key[at * KEYS + k] * update;
            worst = fmax(worst, fabs(next - to[k * values + v]));
            out += job->query[at * KEYS + k] * next;
        }
        worst = fmax(worst, fabs(out - job->out[at * values + v]));
    }
    return worst;
}

static int check(int64_t values, int set) {
    const int64_t rows = SEQUENCES * HEADS, states = SLOTS * HEADS * KEYS * values;
    static const int64_t reads[] = {4, 1, 0}, writes[] = {2, 1, 3};
    /* Buffers of their exact sizes, so that the sanitizer sees what lies beside them. */
    float *parts[8];
    const int64_t sizes[] = {states, rows * KEYS, rows * KEYS, rows * values, rows, rows, rows * values, states};
    for (int i = 0; i < 8; i++) {
        parts[i] = malloc((size_t)sizes[i] * sizeof(float));
        fill(parts[i], sizes[i]);
    }
    memcpy(parts[7], parts[0], (size_t)states * sizeof(float));
    const DeltaStep job = {SEQUENCES, HEADS,    KEYS,     values,   parts[0], reads,   writes,
                           parts[1],  parts[2], parts[3], parts[4], parts[5], parts[6]};
    double worst = 0.0;
    const int status = delta_step(&job, set);
    for (int64_t row = 0; !status && row < SEQUENCES; row++)
        for (int64_t head = 0; head < HEADS; head++) worst = fmax(worst, head_error(&job, parts[7], row, head));
    for (int i = 0; i < 8; i++) free(parts[i]);
    if (status || worst < 1e-5) return 0;
    fprintf(stderr, "set %d, %d value channels: off by %g\n", set, (int)values, worst);
    return 1;
}

int main(void) {
    int failures = 0;
    pool_set_threads(2);
    for (int set = 0; set < NUM_INSTRUCTION_SETS; set++)
        for (int64_t values = 16; values <= MOST_VALUES; values += 16) failures += check(values, set);
    return failures != 0;
}
