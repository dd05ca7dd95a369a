#include "state/parts.h"

enum { SIDE_BY_SIDE = 16 }; /* lanes of a unit */

/* Copies inputs that the convolution still sees to the window of a slot. */
INLINE void keep_window(const StateStep *job, int64_t slot, int64_t lane, const Lanes *seen, int is_wide) {
    const StateLayer *layer = job->layer;
    const int64_t taps = layer->kernel - 1;
    for (int64_t tap = 0; tap < taps; tap++)
        store_activations(job->windows, (slot * taps + tap) * layer->channels + lane * LANES, seen[tap + 1], is_wide);
}

INLINE void load_window(const StateStep *job, int64_t slot, int64_t lane, Lanes *seen, int is_wide) {
    const StateLayer *layer = job->layer;
    const int64_t taps = layer->kernel - 1;
    for (int64_t tap = 0; tap < taps; tap++)
        seen[tap + 1] = load_activations(job->windows, (slot * taps + tap) * layer->channels + lane * LANES, is_wide);
}

/* One row of sixteen channels, behind its activation. `seen` are the inputs of the last rows. */
INLINE void convolve_lane(const StateStep *job, int64_t row, int64_t lane, Lanes *seen, int is_wide) {
    const StateLayer *layer = job->layer;
    const int64_t channel = lane * LANES;
    for (int64_t tap = 1; tap < layer->kernel; tap++) seen[tap - 1] = seen[tap];
    seen[layer->kernel - 1] =
        load_activations(job->projected, row * job->projected_stride + layer->conv_at[lane], is_wide);
    Lanes sum = seen[0] * lanes_load(layer->conv + channel);
    for (int64_t tap = 1; tap < layer->kernel; tap++)
        sum += seen[tap] * lanes_load(layer->conv + tap * layer->channels + channel);
    if (layer->conv_bias) sum += lanes_load(layer->conv_bias + channel);
    const Lanes rounded = round_activations(sum, is_wide);
    lanes_store(job->convolved + row * layer->channels + channel, round_activations(lanes_silu(rounded), is_wide));
}

INLINE void convolve_unit(const StateStep *job, int64_t sequence, int64_t first, int64_t stop, int is_wide) {
    Lanes seen[SIDE_BY_SIDE][MOST_TAPS];
    for (int64_t lane = first; lane < stop; lane++)
        load_window(job, job->reads[sequence], lane, seen[lane - first], is_wide);
    int64_t segment = job->first_segments[sequence];
    for (int64_t row = job->row_starts[sequence]; row < job->row_starts[sequence + 1]; row++) {
        for (int64_t lane = first; lane < stop; lane++) convolve_lane(job, row, lane, seen[lane - first], is_wide);
        if (row + 1 < job->segment_starts[segment + 1]) continue;
        for (int64_t lane = first; lane < stop; lane++)
            keep_window(job, job->writes[segment], lane, seen[lane - first], is_wide);
        segment++;
    }
}

INLINE int64_t units_of(const StateLayer *layer) {
    return (layer->channels / LANES + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
}

INLINE void convolve(const void *context, int64_t chunk) {
    const Share *share = context;
    const StateLayer *layer = share->job->layer;
    const int64_t units = units_of(layer), lanes = layer->channels / LANES;
    for (int64_t unit = chunk * share->per_chunk; unit < last_unit(share, chunk); unit++) {
        const int64_t first = unit % units * SIDE_BY_SIDE;
        const int64_t stop = first + SIDE_BY_SIDE < lanes ? first + SIDE_BY_SIDE : lanes;
        if (layer->is_wide)
            convolve_unit(share->job, unit / units, first, stop, 1);
        else
            convolve_unit(share->job, unit / units, first, stop, 0);
    }
}

TASKS_OF(convolve)

void convolve_rows(const StateStep *job, int set) {
    const int64_t units = units_of(job->layer) * job->sequences;
    run_units(convolve_tasks[set], job, units, job->rows * job->layer->channels / units);
}
