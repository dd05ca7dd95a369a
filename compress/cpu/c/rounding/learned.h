/* Learned rounding: values of a weight whose codes are moved by offsets, and a step of signed gradient descent.
 *
 * A code less its zero point is c = clamp(round(w / s + v), -z, max_code - z), half to even, and its value c * s. Sums over a group
 * have 16 partial sums, as those of ranges.h: neither the instruction set nor the number of threads changes any bit.
 */
#ifndef NATIVE_LEARNED_H
#define NATIVE_LEARNED_H

#include <stdint.h>

#include "common/dispatch.h"

typedef struct {
    int64_t rows, columns, group;
    const float *latent; /* [rows, columns]: w */
    float *offset;       /* [rows, columns]: v */
    const float *scales; /* [rows, groups]: s */
    const float *zeros;  /* [rows, groups]: z, whole numbers */
    float max_code;
    float *values;         /* [rows, columns]: output of `learned_values` alone; what follows is for `learned_step` */
    const float *gradient; /* [rows, columns], of the loss with respect to values */
    float rate, limit;     /* how far each offset moves, and its largest magnitude */
    float *stretched, *shifted; /* [rows, groups]: outputs, gradients with respect to s and z */
} LearnedRounding;

/* Both return 0, or -1 for an instruction set this machine lacks. */
EXPORT int learned_values(const LearnedRounding *weight, int instruction_set);
EXPORT int learned_step(const LearnedRounding *weight, int instruction_set);

#endif
