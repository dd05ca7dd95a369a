/* Runs layers with a state with every instruction set against a loop over tokens in double; for sanitizers and
 * emulators. There is no norm, and the convolution passes channels on. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/thread_pool.h"
#include "state/state.h"

enum { SEQUENCES = 2, SEGMENTS = 3, ROWS = 14, HEADS = 2, KEYS = 24, MOST_VALUES = 80, SLOTS = 4, TAPS = 2 };

static const int64_t READS[] = {3, 1}, WRITES[] = {0, 2, 1};
static const int32_t ROW_STARTS[] = {0, 13, ROWS}, SEGMENT_STARTS[] = {0, 10, 13, ROWS}, FIRST_SEGMENTS[] = {0, 2, 3};

static float *random_numbers(int64_t count) {
    float *found = malloc((size_t)count * sizeof *found);
    for (int64_t i = 0; i < count; i++) found[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return found;
}

static double silu(double x) { return x / (1.0 + exp(-x)); }

/* Numbers of one token as the layer sees them. */
typedef struct {
    double query[KEYS], key[KEYS], strength, factor;
} Token;

static Token token_of(const StateStep *job, int64_t row, int64_t head) {
    const StateLayer *layer = job->layer;
    const float *projected = (const float *)job->projected + row * job->projected_stride;
    const float *gates = (const float *)job->gates + row * job->gates_stride;
    Token found;
    double query = 1e-6, key = 1e-6;
    for (int k = 0; k < KEYS; k++) {
        found.query[k] = silu(projected[layer->query_at + head * KEYS + k]);
        found.key[k] = silu(projected[layer->key_at + head * KEYS + k]);
        query += found.query[k] * found.query[k], key += found.key[k] * found.key[k];
    }
    for (int k = 0; layer->is_delta && k < KEYS; k++) found.query[k] /= sqrt(query * KEYS), found.key[k] /= sqrt(key);
    const double step = log1p(exp((double)gates[HEADS + head]));
    found.strength = layer->is_delta ? 1.0 / (1.0 + exp(-(double)gates[head])) : step;
    found.factor = exp(layer->decay[head] * step);
    return found;
}

/* Advances the state of one column of values by one token; returns the output. */
static double advance(const Token *token, double value, int is_delta, double *state) {
    double kept = 0.0, out = 0.0;
    for (int k = 0; k < KEYS; k++) kept += token->key[k] * token->factor * state[k];
    const double update = token->strength * (value - (is_delta ? kept : 0.0));
    for (int k = 0; k < KEYS; k++) {
        state[k] = token->factor * state[k] + token->key[k] * update;
        out += token->query[k] * state[k];
    }
    return out;
}

static double column_error(const StateStep *job, const float *before, int64_t sequence, int64_t head, int64_t column) {
    const StateLayer *layer = job->layer;
    const int64_t values = layer->value_dim, at = head * values + column;
    double state[KEYS], worst = 0.0;
    for (int k = 0; k < KEYS; k++) state[k] = before[((READS[sequence] * HEADS + head) * KEYS + k) * values + column];
    for (int64_t segment = FIRST_SEGMENTS[sequence]; segment < FIRST_SEGMENTS[sequence + 1]; segment++) {
        for (int64_t row = SEGMENT_STARTS[segment]; row < SEGMENT_STARTS[segment + 1]; row++) {
            const float *projected = (const float *)job->projected + row * job->projected_stride;
            const Token token = token_of(job, row, head);
            const double out = advance(&token, silu(projected[layer->value_at + at]), layer->is_delta, state);
            const double gated = out * silu(projected[layer->channels + at]);
            worst = fmax(worst, fabs(gated - ((float *)job->out)[row * HEADS * values + at]));
        }
        for (int k = 0; k < KEYS; k++)
            worst = fmax(worst, fabs(state[k] - job->matrices[((WRITES[segment] * HEADS + head) * KEYS + k) * values + column]));
    }
    return worst;
}

static int check(int64_t values, int is_delta, int set) {
    const int64_t width = HEADS * values, channels = 2 * HEADS * KEYS + width, matrices = SLOTS * HEADS * KEYS * values;
    /* Buffers of their exact sizes, so that the sanitizer sees what lies beside them. */
    float *projected = random_numbers(ROWS * (channels + width)), *gates = random_numbers(ROWS * 2 * HEADS);
    float *states = random_numbers(matrices), *before = random_numbers(matrices);
    float *windows = random_numbers(SLOTS * (TAPS - 1) * channels), *conv = random_numbers(TAPS * channels);
    float *scratch[] = {random_numbers(ROWS * channels), random_numbers(ROWS * width), random_numbers(ROWS * width)};
    int32_t *conv_at = malloc((size_t)channels / 16 * sizeof *conv_at), *gate_at = malloc((size_t)width / 16 * sizeof *gate_at);
    const int32_t beta_at[] = {0, 1}, step_at[] = {2, 3};
    const float decay[] = {-0.5f, -2.0f}, dt_bias[] = {0.0f, 0.0f};
    for (int64_t i = 0; i < matrices; i++) before[i] = states[i];
    for (int64_t i = 0; i < channels; i++) conv[i] = 0.0f, conv[channels + i] = 1.0f;
    for (int64_t i = 0; i < channels / 16; i++) conv_at[i] = (int32_t)(16 * i);
    for (int64_t i = 0; i < width / 16; i++) gate_at[i] = (int32_t)(channels + 16 * i);
    const StateLayer layer = {.heads = HEADS, .shared = 1, .key_dim = KEYS, .value_dim = values, .channels = channels,
                              .kernel = TAPS, .key_at = HEADS * KEYS, .value_at = 2 * HEADS * KEYS, .norm_size = values,
                              .is_delta = is_delta, .is_wide = 1, .most_step = INFINITY, .conv = conv, .decay = decay,
                              .dt_bias = dt_bias, .conv_at = conv_at, .gate_at = gate_at, .beta_at = beta_at,
                              .step_at = step_at};
    const StateStep job = {.layer = &layer, .sequences = SEQUENCES, .rows = ROWS, .reads = READS, .writes = WRITES,
                           .row_starts = ROW_STARTS, .segment_starts = SEGMENT_STARTS, .first_segments = FIRST_SEGMENTS,
                           .projected = projected, .gates = gates, .projected_stride = channels + width,
                           .gates_stride = 2 * HEADS, .windows = windows, .matrices = states, .convolved = scratch[0],
                           .found = scratch[1], .out = scratch[2]};
    const int status = state_step(&job, set);
    double worst = 0.0;
    for (int64_t sequence = 0; !status && sequence < SEQUENCES; sequence++)
        for (int64_t at = 0; at < width; at++)
            worst = fmax(worst, column_error(&job, before, sequence, at / values, at % values));
    float *all[] = {projected, gates, states, before, windows, conv, scratch[0], scratch[1], scratch[2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(conv_at), free(gate_at);
    if (status || worst < 1e-5) return 0;
    fprintf(stderr, "set %d, %d value channels, delta %d: off by %g\n", set, (int)values, is_delta, worst);
    return 1;
}

int main(void) {
    int failures = 0;
    pool_set_threads(2);
    for (int set = 0; set < NUM_INSTRUCTION_SETS; set++)
        for (int64_t values = 16; values <= MOST_VALUES; values += 32)
            for (int is_delta = 0; is_delta < 2; is_delta++) failures += check(values, is_delta, set);
    return failures != 0;
}
