/* Operations between the products of a decoder layer, on rows of bfloat16 numbers. Numbers are rounded to bfloat16
 * where transformers rounds them, and nowhere else. Rows are independent of each other. Sizes are multiples of 16, of
 * heads 32. Functions return 0, or -1 for an instruction set that this machine lacks. */
#ifndef NATIVE_GLUE_H
#define NATIVE_GLUE_H

#include <stdint.h>

#include "common/dispatch.h"

typedef struct {
    int64_t rows, size;
    uint16_t *hidden;       /* [rows, size]; the update is added to it */
    const uint16_t *update; /* [rows, size], or NULL for none */
    const uint16_t *weight; /* [size] */
    float eps;
    uint16_t *out;          /* [rows, size]: hidden / sqrt(mean square + eps), times weight */
    const float *wide;      /* [size], a weight in place of the other that multiplies before rounding, or NULL */
} AddNorm;

EXPORT int add_rms_norm(const AddNorm *job, int instruction_set);

typedef struct {
    int64_t rows, heads, head_dim;
    uint16_t *x;            /* [rows, heads, head_dim], changed in place; rows are `stride` elements apart */
    int64_t stride;
    const uint16_t *weight; /* [heads, head_dim] of a norm over each head, or NULL for none */
    float eps;
    const uint16_t *cos, *sin; /* [rows, head_dim]; the sine of the first half is negated */
} Rotate;

/* x * cos + (x with its halves exchanged) * sin */
EXPORT int rotate(const Rotate *job, int instruction_set);

typedef enum { SILU, GELU_TANH, CLAMPED } ActivationKind;

/* SILU: gate * sigmoid(gate) * up. GELU_TANH: the approximation of GELU by tanh. CLAMPED: gate * sigmoid(alpha * gate) *
 * (up + 1), of gates up to the limit and ups of at most that size (arXiv:2508.10925). */
typedef struct {
    int32_t kind;
    float alpha, limit; /* of CLAMPED; the limit is a bfloat16 number */
} Activation;

typedef struct {
    int64_t rows, size;
    const uint16_t *gate_up; /* [rows, 2 * size] */
    uint16_t *out;           /* [rows, size] */
    Activation activation;
} ActivateMultiply;

EXPORT int activate_and_mul(const ActivateMultiply *job, int instruction_set);

#endif
