/* Multiplies trellis codes of every width and codebook with every instruction set on buffers of exactly their size, searches
 * codes of some widths, and compares sets. Numbers are checked elsewhere. Built with sanitizers by test_sanitizers.py. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/bf16.h"
#include "common/thread_pool.h"
#include "trellis/search.h"
#include "trellis/trellis.h"
#include "driver.h"

static float *floats(int64_t count) {
    float *made = exactly(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = (float)(draw(2000) - 1000) / 1000;
    return made;
}

static int compare(int set, int pair_bits, int codebook) {
    const int64_t inputs = TURN * (1 + draw(2)), outputs = TURN * (1 + draw(3)), rows = draw(2) ? 1 + draw(12) : 65;
    const int64_t words = inputs * outputs * pair_bits / 64;
    const int is_wide = (int)draw(2);
    TrellisWeight weight = {.out_features = outputs, .in_features = inputs, .pair_bits = pair_bits, .codebook = codebook};
    uint32_t *stored = exactly(words * 4);
    for (int64_t i = 0; i < words; i++) stored[i] = (uint32_t)draw(1 << 16) << 16 | (uint32_t)draw(1 << 16);
    float *in_scales = floats(inputs), *out_scales = floats(outputs), *bias = floats(outputs), *x = floats(rows * inputs);
    uint16_t *narrow = exactly(rows * inputs * 2);
    for (int64_t i = 0; i < rows * inputs; i++) narrow[i] = bfloat16_of(x[i]);
    weight.words = stored, weight.in_scales = in_scales, weight.out_scales = out_scales, weight.bias = draw(2) ? bias : NULL;
    void *y[2];
    for (int i = 0; i < 2; i++) {
        y[i] = exactly(rows * outputs * (is_wide ? 4 : 2));
        if (trellis_multiply(&weight, !is_wide, rows, is_wide ? (void *)x : narrow, inputs, y[i], outputs, i ? set : SCALAR))
            exit(FAILED_STATUS);
    }
    float furthest = 0, largest = 0;
    for (int64_t i = 0; i < rows * outputs; i++) {
        float found[2];
        for (int k = 0; k < 2; k++) found[k] = is_wide ? ((float *)y[k])[i] : float_of_bfloat16(((uint16_t *)y[k])[i]);
        furthest = fmaxf(furthest, fabsf(found[0] - found[1]));
        largest = fmaxf(largest, fabsf(found[0]));
    }
    for (int i = 0; i < 2; i++) free(y[i]);
    free(stored), free(in_scales), free(out_scales), free(bias), free(x), free(narrow);
    return furthest <= largest * (is_wide ? 1e-4f : 1e-2f);
}

static int search(int set, int pair_bits) {
    const int64_t tiles = 2, count = tiles * TRELLIS_CODES;
    float *numbers = floats(TRELLIS_STATES), *values = floats(count);
    uint16_t *states[2];
    for (int i = 0; i < 2; i++) {
        states[i] = exactly(count * 2);
        const TrellisSearch wanted = {tiles, pair_bits, numbers, values, states[i]};
        if (trellis_search(&wanted, i ? set : SCALAR)) exit(FAILED_STATUS);
    }
    const int same = !memcmp(states[0], states[1], (size_t)count * 2);
    for (int i = 0; i < 2; i++) free(states[i]);
    free(numbers), free(values);
    return same;
}

int main(void) {
    pool_set_threads(3);
    for (int set = 0; set < NUM_INSTRUCTION_SETS; set++) {
        if (set > native_best_instruction_set() && set != AMX_EMULATED) continue;
        for (int pair_bits = 2; pair_bits <= 2 * MOST_TRELLIS_BITS; pair_bits += 7)
            if (!search(set, pair_bits)) {
                fprintf(stderr, "set %d searches other codes of %d bits for two\n", set, pair_bits);
                return FAILED_NUMBERS;
            }
        for (int pair_bits = 2; pair_bits <= 2 * MOST_TRELLIS_BITS; pair_bits += pair_bits < MOST_ODD_PAIR + 1 ? 1 : 2)
            for (int codebook = pair_bits % 2 ? CODEBOOK_MUL1 : CODEBOOK_3INST; codebook <= CODEBOOK_MUL1; codebook++)
                if (!compare(set, pair_bits, codebook)) {
                    fprintf(stderr, "set %d differs for %d bits for two codes of codebook %d\n", set, pair_bits, codebook);
                    return FAILED_NUMBERS;
                }
    }
    return 0;
}
