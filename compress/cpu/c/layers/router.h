/* Choice of experts for one token, inlined into the functions of each instruction set. A row's choice depends on that row
 * alone; of equal ranks the first expert is chosen. */
#ifndef NATIVE_ROUTER_H
#define NATIVE_ROUTER_H

#include <math.h>
#include <stdbool.h>

#include "common/bf16.h"
#include "layers/mixture.h"

enum { SCORED_TOGETHER = 4 };

INLINE Lanes router_weights(const Router *router, int64_t at) {
    return router->type == FLOAT32 ? lanes_load((const float *)router->scores + at)
                                   : lanes_load_bfloat16((const uint16_t *)router->scores + at);
}

INLINE float router_round(const Router *router, float x) {
    return router->type == FLOAT32 ? x : float_of_bfloat16(bfloat16_of(x));
}

/* Sums of x * weights for `count` experts from the first on, rounded where the weights are bfloat16. */
INLINE void score_some(const Router *router, const uint16_t *x, int64_t first, const int count, float *scores) {
    Lanes even[SCORED_TOGETHER] = {{0}}, odd[SCORED_TOGETHER] = {{0}};
    for (int64_t i = 0; i < router->size; i += 2 * LANES) {
        const Lanes x0 = lanes_load_bfloat16(x + i), x1 = lanes_load_bfloat16(x + i + LANES);
#pragma GCC unroll 4
        for (int e = 0; e < count; e++) {
            const int64_t at = (first + e) * router->size + i;
            even[e] += x0 * router_weights(router, at);
            odd[e] += x1 * router_weights(router, at + LANES);
        }
    }
    for (int e = 0; e < count; e++) {
        const float bias = router->scores_bias ? router->scores_bias[first + e] : 0;
        scores[e] = router_round(router, sum_of_lanes(even[e] + odd[e]) + bias);
    }
}

INLINE void score_all(const Router *router, const uint16_t *x, float *scores) {
    int64_t e = 0;
    for (; e + SCORED_TOGETHER <= router->num_experts; e += SCORED_TOGETHER)
        score_some(router, x, e, SCORED_TOGETHER, scores + e);
    for (; e < router->num_experts; e++) score_some(router, x, e, 1, scores + e);
}

/* Scores to weights, in place. The array is padded to whole lanes. */
INLINE void weigh(const Router *router, float *scores) {
    float highest = scores[0], sum = 0;
    for (int64_t e = 1; e < router->num_experts; e++) highest = scores[e] > highest ? scores[e] : highest;
    for (int64_t e = 0; e < router->num_experts; e += LANES) {
        const Lanes x = lanes_load(scores + e);
        lanes_store(scores + e, router->choice == SIGMOID ? lanes_sigmoid(x) : lanes_exp(x - lanes_of(highest)));
    }
    if (router->choice == SIGMOID) return;
    for (int64_t e = 0; e < router->num_experts; e++) sum += scores[e];
    for (int64_t e = 0; e < router->num_experts; e++) scores[e] /= sum;
}

/* The highest of the ranks that are not taken; -1 when all are. */
INLINE int64_t best_of(const float *ranks, const bool *taken, int64_t first, int64_t last) {
    int64_t best = -1;
    for (int64_t e = first; e < last; e++)
        if (!taken[e] && (best < 0 || ranks[e] > ranks[best])) best = e;
    return best;
}

/* Takes all experts but those of the best groups, which are ranked by the sum of their two best experts. */
INLINE void take_other_groups(const Router *router, const float *ranks, bool *taken) {
    const int64_t size = router->num_experts / router->num_groups;
    float sums[MOST_EXPERTS];
    bool chosen[MOST_EXPERTS] = {false};
    for (int64_t group = 0; group < router->num_groups; group++) {
        const int64_t first = group * size, best = best_of(ranks, taken, first, first + size);
        taken[best] = true;
        sums[group] = ranks[best] + ranks[best_of(ranks, taken, first, first + size)];
        taken[best] = false;
    }
    for (int64_t i = 0; i < router->num_chosen_groups; i++) chosen[best_of(sums, chosen, 0, router->num_groups)] = true;
    for (int64_t e = 0; e < router->num_experts; e++) taken[e] = !chosen[e / size];
}

/* Inserts an expert behind those with lower numbers. */
INLINE void insert_expert(int64_t *chosen, float *weights, int64_t count, int64_t expert, float weight) {
    for (; count > 0 && chosen[count - 1] > expert; count--)
        chosen[count] = chosen[count - 1], weights[count] = weights[count - 1];
    chosen[count] = expert, weights[count] = weight;
}

/* Its share among the experts that are not taken and whose scores come near its own, the best of these. */
INLINE float share_among_near(const Router *router, const float *scores, const bool *taken, int64_t expert) {
    const float best = scores[expert];
    float sum = 0;
    for (int64_t first = 0; first < router->num_experts; first += LANES) {
        float powers[LANES];
        lanes_store(powers, lanes_exp(lanes_load(scores + first) - lanes_of(best)));
        for (int64_t e = first; e < first + LANES && e < router->num_experts; e++) {
            const float size = fabsf(scores[e]), far = (best - scores[e]) / (size < best ? best : size);
            if (!taken[e] && !(far > router->margin)) sum += powers[e - first];
        }
    }
    return 1 / sum;
}

/* One expert after the other, as arXiv:2409.12136 does without noise. */
INLINE void mix_sparsely(const Router *router, const float *scores, int64_t *chosen, float *weights) {
    bool taken[MOST_EXPERTS] = {false};
    for (int64_t i = 0; i < router->num_chosen; i++) {
        const int64_t best = best_of(scores, taken, 0, router->num_experts);
        insert_expert(chosen, weights, i, best, share_among_near(router, scores, taken, best));
        taken[best] = true;
    }
}

INLINE void choose_best(const Router *router, float *scores, int64_t *chosen, float *weights) {
    float ranks[MOST_EXPERTS], sum = 0;
    bool taken[MOST_EXPERTS] = {false};
    weigh(router, scores);
    for (int64_t e = 0; e < router->num_experts; e++) ranks[e] = scores[e] + (router->bias ? router->bias[e] : 0);
    if (router->num_groups > 1) take_other_groups(router, ranks, taken);
    for (int64_t i = 0; i < router->num_chosen; i++) {
        const int64_t best = best_of(ranks, taken, 0, router->num_experts);
        taken[best] = true;
        sum += scores[best];
        insert_expert(chosen, weights, i, best, scores[best]);
    }
    if (sum < router->least_sum) sum = router->least_sum;
    for (int64_t i = 0; i < router->num_chosen; i++)
        weights[i] = (router->normalizes ? weights[i] / sum : weights[i]) * router->scale;
}

/* The chosen experts of one token with their weights, in the order of their numbers. */
INLINE void route_row(const Router *router, const uint16_t *x, int64_t *chosen, float *weights) {
    float scores[MOST_EXPERTS] = {0};
    score_all(router, x, scores);
    if (router->score_scale != 1.0f)
        for (int64_t e = 0; e < router->num_experts; e++) scores[e] = router_round(router, scores[e] * router->score_scale);
    if (router->choice == SPARSEMIXER)
        mix_sparsely(router, scores, chosen, weights);
    else
        choose_best(router, scores, chosen, weights);
    if (router->expert_scales)
        for (int64_t i = 0; i < router->num_chosen; i++) weights[i] *= router->expert_scales[chosen[i]];
}

#endif
