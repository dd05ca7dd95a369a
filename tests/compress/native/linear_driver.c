/* Runs the C linears with every instruction set on buffers of exactly their size, from several threads at once, and
 * compares with sums in double. Built with sanitizers by test_native_sanitized.py. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "pool.h"

enum { FAILED_STATUS = 1, FAILED_NUMBERS = 2, CALLERS = 3, CASES = 16 };

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static uint16_t bfloat16_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

typedef struct {
    uint32_t seed;
    int bits, activations, type, set;
    int64_t rows, outputs, inputs, group;
} Case;

static Case draw_case(uint32_t *state) {
    static const int widths[] = {2, SPARSE, 4, 8, 16};
    Case drawn = {.seed = draw(state), .bits = widths[draw(state) % 5], .type = (int)(draw(state) % 2)};
    drawn.activations = drawn.bits == 16 || drawn.bits == SPARSE ? 0 : (int)(draw(state) % 3);
    drawn.rows = 1 + draw(state) % 20;
    drawn.outputs = 1 + draw(state) % 150;
    drawn.group = 32 * (1 + draw(state) % 5);
    drawn.inputs = drawn.group * (1 + draw(state) % 3);
    if (drawn.bits == 16) drawn.group = drawn.inputs;
    drawn.set = (int)(draw(state) % (uint32_t)(native_best_instruction_set() + 1));
    return drawn;
}

static void *exactly(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL) exit(FAILED_STATUS);
    return memory;
}

static int run_case(Case now) {
    uint32_t state = now.seed;
    const int64_t tiles = (now.outputs + TILE - 1) / TILE, groups = now.inputs / now.group;
    uint8_t *codes = exactly((size_t)(now.outputs * now.inputs));
    uint16_t *numbers = exactly((size_t)(now.outputs * now.inputs) * 2);
    uint32_t *words = exactly((size_t)(tiles * TILE * now.inputs * now.bits / 8));
    float *scales = exactly((size_t)(tiles * TILE * groups) * sizeof *scales);
    uint8_t *zeros = exactly((size_t)(tiles * TILE * groups));
    const size_t size = now.type == FLOAT32 ? 4 : 2;
    float *values = exactly((size_t)(now.rows * now.inputs) * sizeof *values);
    void *x = exactly((size_t)(now.rows * now.inputs) * size), *y = exactly((size_t)(now.rows * now.outputs) * size);
    LinearWeight weight = {now.outputs, now.inputs, now.group, now.bits, FLOAT32, words, scales, zeros, NULL, {0}};
    const int count = now.bits == 16 ? 256 : now.bits == SPARSE ? 16 : 1 << now.bits;
    for (int i = 0; i < 16; i++) weight.table[i] = (float)(i - count / 2);
    for (int64_t i = 0; i < now.outputs * now.inputs; i++) {
        codes[i] = (uint8_t)(draw(&state) % (uint32_t)count);
        if (now.bits == SPARSE && (i + i / 4) % 4 >= 2) codes[i] = 8;
        numbers[i] = bfloat16_bits((float)codes[i] - 128);
    }
    for (int64_t i = 0; i < tiles * TILE * groups; i++) {
        scales[i] = 0.5f + (float)(draw(&state) % 64) / 64;
        zeros[i] = now.bits == SPARSE ? 8 : (uint8_t)(draw(&state) % (uint32_t)count);
    }
    if (now.bits == SPARSE) weight.zeros = NULL;
    for (int64_t i = 0; i < now.rows * now.inputs; i++) {
        values[i] = (float)(draw(&state) % 255) / 64 - 2;
        const uint16_t half = bfloat16_bits(values[i]);
        if (now.type == FLOAT32)
            ((float *)x)[i] = values[i];
        else
            ((uint16_t *)x)[i] = half, values[i] = 0, memcpy((char *)&values[i] + 2, &half, 2);
    }
    if (now.bits == 16) {
        weight.scales = NULL, weight.zeros = NULL;
        linear_pack_bfloat16(numbers, now.outputs, now.inputs, words);
    } else {
        linear_pack(codes, now.outputs, now.inputs, now.bits, words);
    }
    int wrong = linear_multiply(&weight, now.activations, now.type, now.rows, x, now.inputs, y, now.outputs, now.set);
    if (wrong) wrong = FAILED_STATUS;
    for (int64_t row = 0; !wrong && row < now.rows; row++)
        for (int64_t o = 0; o < now.outputs; o++) {
            double sum = 0, size_of_sum = 1e-3;
            for (int64_t k = 0; k < now.inputs; k++) {
                const int64_t at = (o / TILE * groups + k / now.group) * TILE + o % TILE;
                const int code = codes[o * now.inputs + k];
                const double w = now.bits == 16 ? code - 128 : (code - (int)zeros[at]) * (double)scales[at];
                sum += w * (double)values[row * now.inputs + k];
                size_of_sum += fabs(w) * 2;
            }
            float found = 0;
            if (now.type == FLOAT32)
                found = ((float *)y)[row * now.outputs + o];
            else
                memcpy((char *)&found + 2, (uint16_t *)y + row * now.outputs + o, 2);
            const double allowed = now.activations ? 1.0 / 127 : 1e-5;
            if (!(fabs(found - sum) <= allowed * size_of_sum + (now.type == BFLOAT16 ? fabs(sum) / 256 : 0)))
                wrong = FAILED_NUMBERS;
        }
    free(codes), free(numbers), free(words), free(scales), free(zeros), free(values), free(x), free(y);
    if (wrong) fprintf(stderr, "case %u: %d bits, set %d, failed %d\n", now.seed, now.bits, now.set, wrong);
    return wrong;
}

static void *run_cases(void *argument) {
    uint32_t state = (uint32_t)(intptr_t)argument;
    intptr_t wrong = 0;
    for (int i = 0; i < CASES; i++) wrong |= run_case(draw_case(&state));
    return (void *)wrong;
}

int main(void) {
    pthread_t callers[CALLERS];
    intptr_t wrong = 0;
    pool_set_threads(3);
    for (int i = 0; i < CALLERS; i++) pthread_create(&callers[i], NULL, run_cases, (void *)(intptr_t)(i + 1));
    for (int i = 0; i < CALLERS; i++) {
        void *result;
        pthread_join(callers[i], &result);
        wrong |= (intptr_t)result;
    }
    return (int)wrong;
}
