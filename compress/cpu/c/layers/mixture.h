/* A mixture of experts: every row of x chooses some, and gets the weighted sum of what they give. Rows are sorted by
 * expert, so that an expert's weights are read once for all rows that chose it, and the products of all experts are one
 * job of the pool. Everything is rounded to bfloat16 where a decoder that goes from expert to expert, by their numbers,
 * rounds it; a row's result depends on that row alone. */
#ifndef NATIVE_MIXTURE_H
#define NATIVE_MIXTURE_H

#include "layers/norm_rope_act.h"
#include "linear/adapters.h"
#include "linear/linear.h"

enum { MOST_EXPERTS = 1024 };

typedef struct {
    const LinearWeight *weight;
    int64_t activations;      /* one of Activations */
    const Adapters *adapters; /* NULL: none */
} Product;

/* down(activation(gate) * up) */
typedef struct {
    Product gate_up, down;
} Expert;

typedef enum { SOFTMAX, SIGMOID, SPARSEMIXER } Choice;

typedef struct {
    int64_t num_experts, size;   /* at most MOST_EXPERTS; INPUT_MULTIPLE divides the size of x */
    int64_t num_chosen;          /* of every row, at most the experts of the chosen groups */
    int64_t num_groups, num_chosen_groups; /* groups of at least two experts; 1 and 1 for none */
    int32_t type;                /* of the scores: FLOAT32 or BFLOAT16 */
    int32_t choice, normalizes;  /* one of Choice; weights are divided by their sum, or by `least_sum` */
    float scale, least_sum;      /* factor on weights */
    float margin, score_scale;   /* of SPARSEMIXER: how far below the best score others count; factor on scores */
    const void *scores;          /* [num_experts, size] */
    const float *bias;           /* [num_experts], added where experts are chosen; NULL for none */
    const float *scores_bias;    /* [num_experts], added to scores; NULL for none */
    const float *expert_scales;  /* [num_experts], factors on weights; NULL for none */
} Router;

typedef struct {
    Router router;
    int64_t first_held, num_held; /* experts whose weights are here; what others give is left out of the sum */
    const Expert *experts;       /* [num_held], all of the same sizes */
    const Expert *shared;        /* of all rows, or NULL */
    const uint16_t *shared_gate; /* [size]: its product with x is a score whose sigmoid weighs `shared`; NULL for none */
    Activation activation;       /* of all experts */
    int32_t weighs_inputs;       /* weights multiply what an expert reads instead of what it gives */
} Mixture;

/* bfloat16 x [rows, size]: the experts of every row in the order of their numbers, and their weights, both [rows, num_chosen].
 * 0, or -1 for an instruction set that this machine lacks. */
EXPORT int mixture_route(const Mixture *weights, int64_t rows, const uint16_t *x, int64_t *chosen, float *shares,
                         int instruction_set);

/* bfloat16 x and out [rows, size]; the router reads `routed` [rows, size], or x where that is NULL. slots [rows] are those of
 * adapters_add, or NULL for a step without adapters. 0, or less: an instruction set that this machine lacks, or no memory. */
EXPORT int mixture(const Mixture *weights, int64_t rows, const uint16_t *x, const uint16_t *routed, const int64_t *slots,
                   uint16_t *out, int instruction_set);

#endif
