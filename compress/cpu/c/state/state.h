/* A layer with a recurrent state, all between its linears: a causal convolution, the scan over the matrices of heads, and
 * a norm with a gate. The scan is the gated delta rule (arXiv:2412.06464) or Mamba-2 (arXiv:2405.21060). With the state
 * S [K, V] of a head, factor f, key k, query q and value v of a token:
 *
 *     delta rule  u = beta * (v - f * k S)     Mamba-2  u = step * v
 *     S' = f * S + k^T u                       output   q S' (+ skip * v)
 *
 * A few tokens are computed at once, so that a state is read and written once for all of them. What a sequence gets does
 * not depend on what is computed beside it, and on where it is cut only by rounding. */
#ifndef NATIVE_STATE_H
#define NATIVE_STATE_H

#include <stdint.h>

#include "common/dispatch.h"

enum { MOST_TAPS = 8, MOST_KEYS = 256 };

typedef enum { NO_NORM, NORM_BEFORE_GATE, NORM_BEHIND_GATE } NormPlace;

/* A layer, the same in every step. Channels of keys and values, and groups of a norm, are multiples of 16. */
typedef struct {
    int64_t heads, shared;      /* heads, and how many of them have the same query and key */
    int64_t key_dim, value_dim; /* channels of a head */
    int64_t channels, kernel;   /* of the convolution; it sees `kernel` tokens */
    int64_t query_at, key_at, value_at; /* first channels of each, head by head, behind the convolution */
    int64_t norm_size;                  /* channels of a group of the norm */
    int32_t is_delta;                   /* the gated delta rule; else Mamba-2 */
    int32_t is_wide;                    /* activations are float32, else bfloat16 */
    int32_t norm_place, is_norm_wide;   /* NormPlace; whether the norm's weight was float32 */
    float eps, least_step, most_step;   /* limits of the steps of Mamba-2 */
    const float *conv, *conv_bias;      /* [kernel, channels], [channels] or NULL */
    const float *decay, *dt_bias;       /* [heads]; the decay is negative */
    const float *skip;                  /* [heads]; NULL for none */
    const float *norm;                  /* [norm_size] for the delta rule, else [heads * value_dim] */
    const int32_t *conv_at;             /* [channels / 16] places in a projected row */
    const int32_t *gate_at;             /* [heads * value_dim / 16] places in a projected row */
    const int32_t *beta_at, *step_at;   /* [heads] places in a row of gates; no beta for Mamba-2 */
} StateLayer;

/* One step. Rows, segments and slots are those of runtime/core/state_rows.py. */
typedef struct {
    const StateLayer *layer;
    int64_t sequences, rows;
    const int64_t *reads, *writes;            /* slots of [sequences] and [segments] */
    const int32_t *row_starts;                /* [sequences + 1] */
    const int32_t *segment_starts;            /* [segments + 1] */
    const int32_t *first_segments;            /* [sequences + 1] */
    const void *projected, *gates;            /* activations, rows of these strides */
    int64_t projected_stride, gates_stride;
    void *windows;                            /* activations [slots, kernel - 1, channels] */
    float *matrices;                          /* [slots, heads, key_dim, value_dim] */
    float *convolved, *found;                 /* scratch, [rows, channels] and [rows, heads * value_dim] */
    void *out;                                /* activations [rows, heads * value_dim] */
} StateStep;

/* Returns 0, or -1 when this machine lacks the instruction set. */
EXPORT int state_step(const StateStep *job, int instruction_set);

#endif
