#include "state/parts.h"

INLINE Lanes gate_of(const StateStep *job, int64_t row, int64_t lane, int is_wide) {
    const int64_t at = row * job->projected_stride + job->layer->gate_at[lane];
    return lanes_silu(load_activations(job->projected, at, is_wide));
}

/* Stores what the norm reads in place; returns one over the root of its mean square, 1 without a norm. */
INLINE float prepare_group(const StateStep *job, int64_t row, int64_t first, float *x, int is_wide) {
    const StateLayer *layer = job->layer;
    Lanes sum[2] = {{0}, {0}};
    if (layer->norm_place == NO_NORM) return 1.0f;
    for (int64_t i = 0; i < layer->norm_size; i += LANES) {
        Lanes value = lanes_load(x + i);
        if (layer->is_delta) value = round_activations(value, is_wide);
        if (layer->norm_place == NORM_BEHIND_GATE) value *= gate_of(job, row, (first + i) / LANES, is_wide);
        lanes_store(x + i, value);
        sum[i / LANES % 2] += value * value;
    }
    return 1.0f / sqrtf(sum_of_lanes(sum[0] + sum[1]) / (float)layer->norm_size + layer->eps);
}

/* Rounded as transformers does: the norm of the delta rule is one of activations, that of Mamba-2 of floats. */
INLINE Lanes normalized(const StateLayer *layer, Lanes x, int64_t channel, float factor, int is_wide) {
    x *= lanes_of(factor);
    if (!layer->is_delta) return x * lanes_load(layer->norm + channel);
    if (!layer->is_norm_wide) x = round_activations(x, is_wide);
    return round_activations(x * lanes_load(layer->norm + channel % layer->norm_size), is_wide);
}

INLINE void gate_group(const StateStep *job, int64_t row, int64_t group, int is_wide) {
    const StateLayer *layer = job->layer;
    const int64_t width = layer->heads * layer->value_dim, first = group * layer->norm_size;
    float *x = job->found + row * width + first;
    const float factor = prepare_group(job, row, first, x, is_wide);
    for (int64_t i = 0; i < layer->norm_size; i += LANES) {
        Lanes value = lanes_load(x + i);
        if (layer->norm_place != NO_NORM) value = normalized(layer, value, first + i, factor, is_wide);
        if (layer->norm_place != NORM_BEHIND_GATE) value *= gate_of(job, row, (first + i) / LANES, is_wide);
        store_activations(job->out, row * width + first + i, value, is_wide);
    }
}

INLINE int64_t groups_of(const StateLayer *layer) { return layer->heads * layer->value_dim / layer->norm_size; }

INLINE void gate(const void *context, int64_t chunk) {
    const Share *share = context;
    const int64_t groups = groups_of(share->job->layer);
    for (int64_t unit = chunk * share->per_chunk; unit < last_unit(share, chunk); unit++)
        if (share->job->layer->is_wide)
            gate_group(share->job, unit / groups, unit % groups, 1);
        else
            gate_group(share->job, unit / groups, unit % groups, 0);
}

TASKS_OF(gate)

void gate_rows(const StateStep *job, int set) {
    run_units(gate_tasks[set], job, job->rows * groups_of(job->layer), job->layer->norm_size);
}
