/* From rows of logits to tokens and log-probabilities. A result depends on its own row alone. Functions return 0, or -1 for
 * an instruction set that this machine lacks. */
#ifndef NATIVE_SAMPLING_H
#define NATIVE_SAMPLING_H

#include <stdint.h>

#include "common/dispatch.h"

/* Changes of a row's logits: first biases, then the mask, then penalties. Token ids outside of the vocabulary change
 * nothing. */
typedef struct {
    const uint8_t *mask; /* one bit per token, set where it may be drawn; NULL allows all */
    int64_t mask_bytes;  /* tokens behind the mask may not be drawn */
    const int64_t *bias_ids;
    const double *biases;
    int64_t num_biases;
    const int64_t *history; /* tokens of the prompt, then those of the output */
    int64_t num_prompt, num_output;
    double repetition, frequency, presence;
} Adjustment;

/* In place of a token: the logits are not finite, nothing may be drawn, or it is left open, because rounding decides or memory
 * ran out. */
enum { NOT_FINITE = -1, FORBIDDEN = -2, UNDECIDED = -3 };

/* Draws by the Gumbel-max rule, with the noise of runtime/backends/torch/ops.py: a hash of seed, position and token, and two
 * logarithms. The candidates are those of runtime/sampling/logits_processors.py. */
typedef struct {
    int64_t rows, vocab;
    const float *logits;                             /* [rows, vocab] */
    const int64_t *seeds, *positions, *top_k;        /* [rows]; top-k 0 is off */
    const double *temperature, *top_p, *min_p;       /* [rows]; at temperature 0 the first of the highest wins */
    const Adjustment *adjustments;                   /* [rows], or NULL */
    int64_t *tokens;                                 /* [rows] */
} SampledRows;

EXPORT int sample_rows(const SampledRows *job, int instruction_set);

typedef struct {
    int64_t rows, vocab, num_top;
    const float *logits;      /* [rows, vocab] */
    const int64_t *token_ids; /* [rows] */
    float *chosen;            /* [rows]: log-probabilities of these tokens; NaN where a logit is NaN or infinity, or without memory */
    int64_t *top_ids;         /* [rows, num_top]: the most likely tokens, of equal ones the lowest id first */
    float *top;               /* [rows, num_top] */
} LogprobRows;

EXPORT int logprob_rows(const LogprobRows *job, int instruction_set);

#endif
