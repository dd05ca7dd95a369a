/* Runs mixtures with every instruction set, on buffers of exactly their size: of any router, with and without a shared expert.
 * Rows alone must give the bits of rows together, and sets must agree roughly; numbers are checked elsewhere. Built with
 * sanitizers, and for ARM, by test_sanitizers.py. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/bf16.h"
#include "common/thread_pool.h"
#include "layers/mixture.h"
#include "driver.h"

enum { CASES = 24, FAILED_ROW = 3, GROUP = 32 };

static float number(void) { return (float)(draw(257) - 128) / 128; }

static uint16_t *halves(int64_t count) {
    uint16_t *made = exactly(count * 2);
    for (int64_t i = 0; i < count; i++) made[i] = bfloat16_of(number());
    return made;
}

static float *floats(int64_t count) {
    float *made = exactly(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = number();
    return made;
}

/* Symmetric codes of 4 bits. */
static Product linear(int64_t outputs, int64_t inputs, int activations) {
    const int64_t padded = (outputs + TILE - 1) / TILE * TILE;
    LinearWeight *weight = exactly(sizeof *weight);
    uint32_t *words = exactly(padded * inputs / 2);
    float *scales = floats(padded * (inputs / GROUP));
    for (int64_t i = 0; i < padded * inputs / 8; i++) words[i] = (uint32_t)draw(1 << 24) * 257u;
    for (int64_t i = 0; i < padded * (inputs / GROUP); i++) scales[i] *= 0.02f;
    *weight = (LinearWeight){.out_features = outputs, .in_features = inputs, .group = GROUP, .bits = 4};
    weight->scale_type = FLOAT32, weight->words = words, weight->scales = scales;
    for (int i = 0; i < 16; i++) weight->table[i] = (float)(i - 8);
    return (Product){weight, activations, NULL};
}

static void discard(Product product) {
    free((void *)product.weight->words), free((void *)product.weight->scales), free((void *)product.weight);
}

static Expert expert(int64_t size, int64_t inner, int activations) {
    return (Expert){linear(2 * inner, size, activations), linear(size, inner, activations)};
}

static Router draw_router(void) {
    Router router = {.num_groups = 1 + draw(4), .size = 32 * (1 + draw(5)), .scale = 1.5f};
    const int64_t in_group = 2 + draw(5);
    router.num_experts = router.num_groups * in_group;
    router.num_chosen_groups = 1 + draw(router.num_groups);
    router.num_chosen = 1 + draw(router.num_chosen_groups * in_group);
    router.type = draw(2) ? FLOAT32 : BFLOAT16;
    router.choice = (int32_t)draw(3), router.normalizes = draw(2);
    router.margin = 0.5f, router.score_scale = draw(2) ? 1.0f : 0.75f;
    router.scores = router.type == FLOAT32 ? (void *)floats(router.num_experts * router.size)
                                           : (void *)halves(router.num_experts * router.size);
    router.bias = draw(2) ? floats(router.num_experts) : NULL;
    router.scores_bias = draw(2) ? floats(router.num_experts) : NULL;
    router.expert_scales = draw(2) ? floats(router.num_experts) : NULL;
    return router;
}

static int compare(const Mixture *weights, int64_t rows, const uint16_t *x, int set) {
    const int64_t size = weights->router.size;
    uint16_t *together = exactly(rows * size * 2), *alone = exactly(size * 2), *plain = exactly(rows * size * 2);
    int wrong = mixture(weights, rows, x, NULL, NULL, together, set) || mixture(weights, rows, x, x, NULL, plain, SCALAR);
    for (int64_t row = 0; !wrong && row < rows; row++) {
        if (mixture(weights, 1, x + row * size, NULL, NULL, alone, set)) wrong = FAILED_STATUS;
        if (memcmp(alone, together + row * size, (size_t)size * 2)) wrong = FAILED_ROW;
    }
    for (int64_t i = 0; !wrong && i < rows * size; i++) {
        const float found = float_of_bfloat16(together[i]), expected = float_of_bfloat16(plain[i]);
        if (!(fabsf(found - expected) <= 0.05f + 0.05f * fabsf(expected))) wrong = FAILED_NUMBERS;
    }
    free(together), free(alone), free(plain);
    return wrong;
}

static int run_case(int set) {
    Mixture weights = {.router = draw_router(), .weighs_inputs = draw(2)};
    weights.activation = (Activation){(int32_t)draw(3), 1.702f, 1.5f};
    const int64_t size = weights.router.size, inner = 32 * (1 + draw(4)), rows = 1 + draw(20);
    const int activations = draw(2) ? ACTIVATIONS_FLOAT : ACTIVATIONS_INT8_GROUP;
    weights.first_held = draw(2) ? draw((int)weights.router.num_experts) : 0;
    weights.num_held = weights.router.num_experts - weights.first_held;
    Expert *experts = exactly(weights.num_held * (int64_t)sizeof *experts), shared = {0};
    for (int64_t e = 0; e < weights.num_held; e++) experts[e] = expert(size, inner, activations);
    weights.experts = experts;
    if (draw(2)) shared = expert(size, 32 * (1 + draw(6)), activations), weights.shared = &shared;
    if (weights.shared && draw(2)) weights.shared_gate = halves(size);
    uint16_t *x = halves(rows * size);
    const int wrong = compare(&weights, rows, x, set);
    for (int64_t e = 0; e < weights.num_held; e++) discard(experts[e].gate_up), discard(experts[e].down);
    if (weights.shared) discard(shared.gate_up), discard(shared.down);
    free(experts), free(x), free((void *)weights.shared_gate);
    free((void *)weights.router.scores), free((void *)weights.router.bias);
    free((void *)weights.router.scores_bias), free((void *)weights.router.expert_scales);
    return wrong;
}

int main(void) {
    pool_set_threads(3);
    int wrong = 0;
    for (int i = 0; !wrong && i < CASES; i++) {
        wrong = run_case(i % (native_best_instruction_set() + 1));
        if (wrong) fprintf(stderr, "case %d failed: %d\n", i, wrong);
    }
    return wrong;
}
