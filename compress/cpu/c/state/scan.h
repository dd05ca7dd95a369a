/* The scan over the matrices of heads, compiled for one instruction set. Files that include this say with SCAN_WIDTH how
 * many floats its registers hold, and begin with a pragma for its target: what is only inlined into a function for a
 * target is taken apart by GCC before. */
#ifndef NATIVE_SCAN_H
#define NATIVE_SCAN_H

#include "state/parts.h"

typedef float Strip __attribute__((vector_size(4 * SCAN_WIDTH)));

INLINE Strip strip_of(float x) { return x - (Strip){0}; }

INLINE Strip strip_load(const float *from) {
    Strip x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void strip_store(float *to, Strip x) { memcpy(to, &x, sizeof x); }

enum { TILE = 8, KEY_STRIDE = MOST_KEYS + LANES };
static const float KEY_EPS = 1e-6f; /* of the norm over queries and keys of the delta rule */

/* Tokens of one head that are computed at once; those beyond the last one are zeros. Decay is what is left of a number
 * from one token to a later one. */
typedef struct {
    float query[TILE][KEY_STRIDE], key[TILE][KEY_STRIDE];
    float strength[TILE];     /* beta, or the step of Mamba-2 */
    float seen[TILE];         /* decay of the state before the first token */
    float left[TILE];         /* decay from a token to the last one */
    float score[TILE][TILE];  /* of a query to the update of a token before it or its own */
    float shared[TILE][TILE]; /* share of an earlier update that a key of the delta rule takes back */
} Tile;

INLINE float dot(const float *a, const float *b, int64_t size) {
    Strip sums = {0};
    float sum = 0.0f;
    for (int64_t i = 0; i < size; i += SCAN_WIDTH) sums += strip_load(a + i) * strip_load(b + i);
    for (int lane = 0; lane < SCAN_WIDTH; lane++) sum += sums[lane];
    return sum;
}

/* Up to the next multiple of LANES, with zeros behind the numbers. */
INLINE void copy_padded(const float *from, int64_t size, float *to) {
    memcpy(to, from, (size_t)size * sizeof *to);
    for (; size % LANES; size++) to[size] = 0.0f;
}

INLINE void scale(float *x, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += SCAN_WIDTH) strip_store(x + i, strip_load(x + i) * strip_of(factor));
}

/* Normalized for the delta rule, which also scales queries. */
INLINE void load_keys(const StateStep *job, int64_t head, int64_t row, int64_t token, Tile *tile) {
    const StateLayer *layer = job->layer;
    const int64_t size = layer->key_dim, pair = head / layer->shared * size;
    const float *from = job->convolved + row * layer->channels;
    float *query = tile->query[token], *key = tile->key[token];
    copy_padded(from + layer->query_at + pair, size, query);
    copy_padded(from + layer->key_at + pair, size, key);
    if (!layer->is_delta) return;
    scale(query, size, 1.0f / (sqrtf(dot(query, query, size) + KEY_EPS) * sqrtf((float)size)));
    scale(key, size, 1.0f / sqrtf(dot(key, key, size) + KEY_EPS));
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE float rounded_sigmoid(float x, int is_wide) {
    const float y = 1.0f / (1.0f + expf(-x));
    return is_wide ? y : float_of_bfloat16(bfloat16_of(y));
}

/* Sets the strength of a token; returns its factor on the state. */
INLINE float load_gates(const StateStep *job, int64_t head, int64_t row, float *strength) {
    const StateLayer *layer = job->layer;
    const int64_t at = row * job->gates_stride;
    float step = softplus(load_activation(job->gates, at + layer->step_at[head], layer->is_wide) + layer->dt_bias[head]);
    if (layer->is_delta) {
        *strength = rounded_sigmoid(load_activation(job->gates, at + layer->beta_at[head], layer->is_wide), layer->is_wide);
    } else {
        step = fminf(fmaxf(step, layer->least_step), layer->most_step);
        *strength = step;
    }
    return expf(layer->decay[head] * step);
}

INLINE void fill_tile(const StateStep *job, int64_t head, int64_t row, int64_t count, const int tokens, Tile *tile) {
    const int64_t keys = job->layer->key_dim;
    float decay[TILE] = {0}; /* from each token to the current one */
    float seen = 1.0f;
    for (int t = 0; t < tokens; t++) {
        tile->strength[t] = tile->seen[t] = 0.0f;
        for (int s = 0; s < tokens; s++) tile->score[t][s] = tile->shared[t][s] = 0.0f;
        if (t >= count) {
            memset(tile->query[t], 0, KEY_STRIDE * sizeof(float));
            memset(tile->key[t], 0, KEY_STRIDE * sizeof(float));
            continue;
        }
        load_keys(job, head, row + t, t, tile);
        const float factor = load_gates(job, head, row + t, &tile->strength[t]);
        tile->seen[t] = seen *= factor;
        for (int s = 0; s < t; s++) decay[s] *= factor;
        decay[t] = 1.0f;
        for (int s = 0; s <= t; s++) tile->score[t][s] = decay[s] * dot(tile->query[t], tile->key[s], keys);
        for (int s = 0; job->layer->is_delta && s < t; s++)
            tile->shared[t][s] = tile->strength[t] * decay[s] * dot(tile->key[t], tile->key[s], keys);
    }
    for (int t = 0; t < tokens; t++) tile->left[t] = decay[t];
}

/* Columns of values of one head. */
typedef struct {
    const float *values; /* rows of `value_stride` */
    float *out;          /* rows of `out_stride` */
    int64_t value_stride, out_stride, count, keys, width;
    float skip;
} Columns;

/* Updates of the delta rule: a triangular system (arXiv:2412.06464, section 3.3). */
INLINE void solve_updates(const Tile *tile, const Columns *columns, const float *from, const int tokens, const int strips,
                          Strip *update) {
    Strip kept[TILE];
    for (int i = 0; i < tokens * strips; i++) kept[i] = strip_of(0.0f);
    for (int64_t k = 0; k < columns->keys; k++)
        for (int i = 0; i < strips; i++) {
            const Strip state = strip_load(from + k * columns->width + i * SCAN_WIDTH);
            for (int t = 0; t < tokens; t++) kept[t * strips + i] += strip_of(tile->key[t][k]) * state;
        }
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < strips; i++) {
            const Strip rest = update[t * strips + i] - strip_of(tile->seen[t]) * kept[t * strips + i];
            Strip sum = strip_of(tile->strength[t]) * rest;
            for (int s = 0; s < t; s++) sum -= strip_of(tile->shared[t][s]) * update[s * strips + i];
            update[t * strips + i] = sum;
        }
}

/* `strips * SCAN_WIDTH` columns of the state and of the outputs. */
INLINE void scan_columns(const Tile *tile, const Columns *columns, const float *from, float *to, const int tokens,
                         const int strips, const int is_delta) {
    Strip update[TILE], out[TILE];
    const float last = tile->seen[columns->count - 1];
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < strips; i++) {
            const float *value = columns->values + t * columns->value_stride + i * SCAN_WIDTH;
            const Strip x = t < columns->count ? strip_load(value) : strip_of(0.0f);
            update[t * strips + i] = is_delta ? x : strip_of(tile->strength[t]) * x;
            out[t * strips + i] = strip_of(0.0f);
        }
    if (is_delta) solve_updates(tile, columns, from, tokens, strips, update);
    Strip late[TILE];
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < strips; i++) late[t * strips + i] = strip_of(tile->left[t]) * update[t * strips + i];
    for (int64_t k = 0; k < columns->keys; k++)
        for (int i = 0; i < strips; i++) {
            const int64_t at = k * columns->width + i * SCAN_WIDTH;
            const Strip state = strip_load(from + at);
            Strip next = strip_of(last) * state;
            for (int t = 0; t < tokens; t++) {
                out[t * strips + i] += strip_of(tile->query[t][k]) * state;
                next += strip_of(tile->key[t][k]) * late[t * strips + i];
            }
            strip_store(to + at, next);
        }
    for (int t = 0; t < tokens; t++)
        for (int i = 0; t < columns->count && i < strips; i++) {
            Strip sum = strip_of(tile->seen[t]) * out[t * strips + i];
            for (int s = 0; s <= t; s++) sum += strip_of(tile->score[t][s]) * update[s * strips + i];
            if (!is_delta) sum += strip_of(columns->skip) * strip_load(columns->values + t * columns->value_stride + i * SCAN_WIDTH);
            strip_store(columns->out + t * columns->out_stride + i * SCAN_WIDTH, sum);
        }
}

/* All columns, `strips` side by side while there are as many. */
INLINE void scan_tile(const Tile *tile, Columns columns, const float *from, float *to, const int tokens, const int strips,
                      const int is_delta) {
    int64_t column = 0;
    for (; column < columns.width;) {
        const int fits = strips == 1 || column + strips * SCAN_WIDTH <= columns.width;
        if (fits)
            scan_columns(tile, &columns, from + column, to + column, tokens, strips, is_delta);
        else
            scan_columns(tile, &columns, from + column, to + column, tokens, 1, is_delta);
        const int64_t done = fits ? strips * SCAN_WIDTH : SCAN_WIDTH;
        column += done, columns.values += done, columns.out += done;
    }
}

INLINE void scan_tokens(const StateStep *job, int64_t head, int64_t row, const float *from, float *to, Columns columns,
                        const int tokens, const int strips) {
    Tile tile;
    fill_tile(job, head, row, columns.count, tokens, &tile);
    if (job->layer->is_delta)
        scan_tile(&tile, columns, from, to, tokens, strips, 1);
    else
        scan_tile(&tile, columns, from, to, tokens, strips, 0);
}

/* Returns after how many rows. */
INLINE int64_t scan_some(const StateStep *job, int64_t head, int64_t row, int64_t left, const float *from, float *to) {
    const StateLayer *layer = job->layer;
    const int64_t out_stride = layer->heads * layer->value_dim, at = head * layer->value_dim;
    Columns columns = {.values = job->convolved + row * layer->channels + layer->value_at + at,
                       .out = job->found + row * out_stride + at,
                       .value_stride = layer->channels,
                       .out_stride = out_stride,
                       .count = left < TILE ? left : TILE,
                       .keys = layer->key_dim,
                       .width = layer->value_dim,
                       .skip = layer->skip ? layer->skip[head] : 0.0f};
    if (left == 1)
        scan_tokens(job, head, row, from, to, columns, 1, 4);
    else
        scan_tokens(job, head, row, from, to, columns, TILE, 1);
    return columns.count;
}

INLINE void scan_head(const StateStep *job, int64_t sequence, int64_t head) {
    const StateLayer *layer = job->layer;
    const int64_t size = layer->key_dim * layer->value_dim;
    const float *from = job->matrices + (job->reads[sequence] * layer->heads + head) * size;
    for (int64_t segment = job->first_segments[sequence]; segment < job->first_segments[sequence + 1]; segment++) {
        float *to = job->matrices + (job->writes[segment] * layer->heads + head) * size;
        const int64_t stop = job->segment_starts[segment + 1];
        for (int64_t row = job->segment_starts[segment]; row < stop; from = to)
            row += scan_some(job, head, row, stop - row, from, to);
    }
}

INLINE void scan_heads(const void *context, int64_t chunk) {
    const Share *share = context;
    const int64_t heads = share->job->layer->heads;
    for (int64_t unit = chunk * share->per_chunk; unit < last_unit(share, chunk); unit++)
        scan_head(share->job, unit / heads, unit % heads);
}

#endif
