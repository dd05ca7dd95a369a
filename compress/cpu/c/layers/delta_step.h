/* One token of every sequence in a layer of the gated delta rule (arXiv:2412.06464): with the state S [K, V] of a head,
 * d = factor * S, u = beta * (value - key d), S' = d + key^T u, and the output is query S'. A state is read from memory
 * once and written once. */
#ifndef NATIVE_DELTA_STEP_H
#define NATIVE_DELTA_STEP_H

#include <stdint.h>

#include "common/dispatch.h"

/* All numbers are float32. No slot is written for one sequence and read for another. */
typedef struct {
    int64_t sequences, heads, key_dim, value_dim; /* value_dim is a multiple of 16 */
    float *states;                                /* [slots, heads, key_dim, value_dim] */
    const int64_t *reads, *writes;                /* [sequences] slots */
    const float *query, *key;                     /* [sequences, heads, key_dim] */
    const float *value;                           /* [sequences, heads, value_dim] */
    const float *beta, *factor;                   /* [sequences, heads] */
    float *out;                                   /* [sequences, heads, value_dim] */
} DeltaStep;

/* Returns 0, or -1 when this machine lacks the instruction set. */
EXPORT int delta_step(const DeltaStep *job, int instruction_set);

#endif
