/* Runs the C linears with every instruction set, emulated matrix tiles too, width and kind of activations on buffers of exactly
 * their size, from several threads at once, and compares with sums in double. Built with sanitizers, and for ARM, by
 * test_sanitizers.py. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "linear/linear.h"
#include "common/thread_pool.h"
#include "common/bf16.h"

enum { FAILED_STATUS = 1, FAILED_NUMBERS = 2, CALLERS = 3, KINDS = 16 };

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

typedef struct {
    int bits, activations, type, scale_type, set, symmetric, fewest_tile_rows, minima, is_e4m3, shares_scales;
    int64_t rows, outputs, inputs, group, block; /* block: 0 where there are no steps */
} Case;

/* Codes of 2, 4 and 8 bits with each kind of activations, then those that meet only floats: those above minima, or with
 * steps, and 8-bit floats. */
static Case draw_case(int kind, int set, uint32_t *state) {
    Case drawn = {.bits = 2 << kind % 3, .activations = kind / 3, .set = set, .type = (int)(draw(state) % 2)};
    if (kind >= 9) drawn.bits = kind == 9 ? 16 : kind == 10 ? SPARSE : 2 << (kind - 11), drawn.activations = ACTIVATIONS_FLOAT;
    drawn.scale_type = (int)(draw(state) % 3);
    drawn.fewest_tile_rows = (int)(draw(state) % 3 * 2);
    drawn.symmetric = drawn.bits == SPARSE || draw(state) % 2;
    drawn.rows = 1 + draw(state) % 20;
    drawn.outputs = 1 + draw(state) % 150;
    drawn.group = 32 * (1 + draw(state) % 5);
    drawn.inputs = drawn.group * (1 + draw(state) % 3);
    if (kind > 10) {
        const uint32_t form = draw(state);
        drawn.minima = form & 1, drawn.group = form & 2 ? SMALL_GROUP : 32, drawn.block = form & 4 ? 64 : 0;
        if (drawn.group == SMALL_GROUP) drawn.fewest_tile_rows = 0;
        drawn.symmetric = drawn.minima || drawn.symmetric || drawn.block, drawn.inputs = 64 * (1 + draw(state) % 3);
    }
    if (kind > 13) {
        drawn.bits = 8, drawn.is_e4m3 = drawn.symmetric = 1, drawn.minima = 0, drawn.block = 0;
        drawn.scale_type = kind == 14 ? FLOAT32 : (int)(draw(state) % 4), drawn.shares_scales = kind == 14;
    }
    if (drawn.bits == 16) drawn.group = drawn.inputs;
    return drawn;
}

/* Operands of a product, as plain numbers and as kernels take it; scales and zeros as linear.h lays them out. */
typedef struct {
    uint8_t *codes, *zeros;
    int8_t *steps, *minimum_steps;
    uint8_t *exponents;
    float *scales, *minima, *values;
    uint16_t *numbers, *halves, *minimum_halves;
    uint32_t *words;
    void *x, *y;
    LinearWeight weight;
} Product;

static void *exactly(int64_t bytes) {
    void *memory = malloc((size_t)bytes);
    if (memory == NULL) exit(FAILED_STATUS);
    return memory;
}

static int code_count(int bits) { return bits == 16 ? 256 : bits == SPARSE ? 16 : 1 << bits; }

static int64_t scale_count(const Case *now) {
    return (now->outputs + TILE - 1) / TILE * TILE * (now->inputs / now->group);
}

static int64_t inputs_per_scale(const Case *now) { return now->block ? now->block : now->group; }

static uint16_t half_of(const Case *now, float number) {
    return now->scale_type == FLOAT16 ? float16_of(number) : bfloat16_of(number);
}

static void draw_codes(const Case *now, Product *product, uint32_t *state) {
    const int64_t count = now->outputs * now->inputs;
    product->codes = exactly(count);
    product->numbers = exactly(count * 2);
    product->words = exactly((now->outputs + TILE - 1) / TILE * TILE * now->inputs * now->bits / 8);
    for (int64_t i = 0; i < count; i++) {
        product->codes[i] = (uint8_t)(draw(state) % (uint32_t)code_count(now->bits));
        if (now->is_e4m3 && (product->codes[i] & 0x7f) == 0x7f) product->codes[i] = 0; /* NaN */
        if (now->bits == SPARSE && (i + i / 4) % 4 >= 2) product->codes[i] = 8;
        product->numbers[i] = bfloat16_of((float)product->codes[i] - 128);
    }
    if (now->bits == 16)
        linear_pack_bfloat16(product->numbers, now->outputs, now->inputs, product->words);
    else
        linear_pack(product->codes, now->outputs, now->inputs, now->bits, product->words);
}

/* Scales are exact in all types. */
static void draw_scales(const Case *now, Product *product, uint32_t *state) {
    const int64_t count = scale_count(now) / (now->shares_scales ? TILE : 1), center = code_count(now->bits) / 2;
    product->scales = exactly(count * 4);
    product->exponents = exactly(count);
    product->halves = exactly(count * 2);
    product->zeros = exactly(count);
    product->minima = exactly(count * 4);
    product->minimum_halves = exactly(count * 2);
    product->steps = exactly(count);
    product->minimum_steps = exactly(count);
    for (int64_t i = 0; i < count; i++) {
        product->scales[i] = now->bits == 16 ? 1 : 0.5f + (float)(draw(state) % 64) / 64;
        product->exponents[i] = (uint8_t)(120 + draw(state) % 16);
        if (now->scale_type == E8M0) product->scales[i] = ldexpf(1, product->exponents[i] - 127);
        product->halves[i] = half_of(now, product->scales[i]);
        product->minima[i] = (float)(draw(state) % 64) / 64 - 0.5f;
        product->minimum_halves[i] = half_of(now, product->minima[i]);
        product->steps[i] = (int8_t)(draw(state) % 256 - 128);
        product->minimum_steps[i] = (int8_t)(draw(state) % 256 - 128);
        product->zeros[i] = (uint8_t)(now->symmetric || now->bits == 16 ? center : draw(state) % (2 * center));
    }
}

static void set_weight(const Case *now, Product *product) {
    const int has_scales = now->bits != 16;
    product->weight = (LinearWeight){.out_features = now->outputs, .in_features = now->inputs, .group = now->group};
    product->weight.bits = now->bits, product->weight.words = product->words, product->weight.scale_type = now->scale_type;
    product->weight.fewest_tile_rows = now->fewest_tile_rows;
    product->weight.is_e4m3 = now->is_e4m3, product->weight.shares_scales = now->shares_scales;
    if (has_scales) product->weight.scales = now->scale_type == FLOAT32 ? (void *)product->scales : product->halves;
    if (now->scale_type == E8M0) product->weight.scales = product->exponents;
    if (has_scales && !now->symmetric) product->weight.zeros = product->zeros;
    if (now->minima) product->weight.minima = now->scale_type == FLOAT32 ? (void *)product->minima : product->minimum_halves;
    if (now->block) product->weight.steps = product->steps, product->weight.block = now->block;
    if (now->block && now->minima) product->weight.minimum_steps = product->minimum_steps;
    for (int i = 0; i < 16; i++) product->weight.table[i] = (float)(i - code_count(now->bits) / 2);
}

static void draw_activations(const Case *now, Product *product, uint32_t *state) {
    const int64_t count = now->rows * now->inputs, size = now->type == FLOAT32 ? 4 : 2;
    product->values = exactly(count * 4);
    product->x = exactly(count * size);
    product->y = memset(exactly(now->rows * now->outputs * size), 0xff, (size_t)(now->rows * now->outputs * size)); /* NaN */
    for (int64_t i = 0; i < count; i++) {
        product->values[i] = (float)(draw(state) % 255) / 64 - 2; /* exact in bfloat16 */
        if (now->type == FLOAT32)
            ((float *)product->x)[i] = product->values[i];
        else
            ((uint16_t *)product->x)[i] = bfloat16_of(product->values[i]);
    }
}

/* Bits of exponent 4, of mantissa 3. */
static double value_of_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 128 ? -size : size;
}

static int is_close(const Case *now, const Product *product, int64_t row, int64_t output) {
    double sum = 0, size_of_sum = 1e-3;
    for (int64_t k = 0; k < now->inputs; k++) {
        const int64_t at = (output / TILE * (now->inputs / now->group) + k / now->group) * TILE + output % TILE;
        int64_t scale_at = output / TILE * (now->inputs / inputs_per_scale(now)) + k / inputs_per_scale(now);
        if (!now->shares_scales) scale_at = scale_at * TILE + output % TILE;
        const uint8_t byte = product->codes[output * now->inputs + k];
        const double code = now->is_e4m3 ? value_of_e4m3(byte) : byte - product->zeros[at];
        const double above = code * (double)product->scales[scale_at] * (now->block ? product->steps[at] : 1);
        const double step = now->block ? product->minimum_steps[at] : 1;
        const double minimum = now->minima ? (double)product->minima[scale_at] * step : 0;
        sum += (above - minimum) * (double)product->values[row * now->inputs + k];
        size_of_sum += (fabs(above) + fabs(minimum)) * 2;
    }
    const int64_t at = row * now->outputs + output;
    const int narrow = now->type == BFLOAT16;
    const float found = narrow ? float_of_bfloat16(((uint16_t *)product->y)[at]) : ((float *)product->y)[at];
    const double allowed = now->activations ? 1.0 / 127 : 1e-5;
    return fabs((double)found - sum) <= allowed * size_of_sum + (narrow ? fabs(sum) / 256 : 0);
}

static int run_case(const Case *now, uint32_t *state) {
    Product product;
    draw_codes(now, &product, state);
    draw_scales(now, &product, state);
    draw_activations(now, &product, state);
    set_weight(now, &product);
    int wrong = linear_multiply(&product.weight, now->activations, now->type, now->rows, product.x, now->inputs, product.y,
                                now->outputs, now->set)
                    ? FAILED_STATUS
                    : 0;
    for (int64_t i = 0; !wrong && i < now->rows * now->outputs; i++)
        if (!is_close(now, &product, i / now->outputs, i % now->outputs)) wrong = FAILED_NUMBERS;
    free(product.codes), free(product.zeros), free(product.scales), free(product.values), free(product.numbers);
    free(product.halves), free(product.words), free(product.x), free(product.y);
    free(product.exponents), free(product.minima), free(product.minimum_halves), free(product.steps), free(product.minimum_steps);
    if (wrong)
        fprintf(stderr, "failed %d: %d bits, activations %d of type %d, scales %d, set %d, %d rows, %d outputs, groups of %d in blocks of %d, minima %d\n",
                wrong, now->bits, now->activations, now->type, now->scale_type, now->set, (int)now->rows, (int)now->outputs,
                (int)now->group, (int)now->block, now->minima);
    return wrong;
}

static void *run_cases(void *argument) {
    uint32_t state = (uint32_t)(intptr_t)argument;
    intptr_t wrong = 0;
    for (int i = SCALAR, best = native_best_instruction_set(); i <= best + 1; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            const Case now = draw_case(kind, i > best ? AMX_EMULATED : i, &state);
            wrong |= run_case(&now, &state);
        }
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
