/* Runs the search for ranges, the rounding to codes and a step of learned rounding with every instruction set on buffers of
 * exactly their size; all sets must give the same bits. Numbers are checked elsewhere. Built with sanitizers by test_sanitizers.py. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/thread_pool.h"
#include "rounding/learned.h"
#include "rounding/ranges.h"
#include "driver.h"

enum { CASES = 12 };

static float *floats(int64_t count, int64_t least) {
    float *made = exactly(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = (float)(draw(2000) + least) / 1000;
    return made;
}

static void fill(RangeSearch *search) {
    for (int i = 0; i < MOST_TRIALS; i++) {
        const float share = 1.0f - 0.03f * (float)(i < search->parts ? i : search->parts - 1);
        search->below[i] = search->symmetric ? -share / search->midpoint : share;
        search->above[i] = share * share;
        search->factor[i] = 0.97f + 0.01f * (float)(i < search->neighbours ? i : search->neighbours - 1);
        search->shift[i] = search->symmetric ? 0.0f : (float)(i % 3 - 1);
    }
}

static int compare(int set) {
    const int64_t bits = 2 + draw(7), groups = 1 + draw(4);
    RangeSearch search = {.rows = 1 + draw(40), .group = 1 + draw(70), .symmetric = draw(2), .scale_dtype = draw(3)};
    search.kept = 1 + draw(MOST_KEPT);
    search.columns = search.group * groups, search.parts = 1 + draw(30), search.neighbours = 1 + draw(20);
    search.max_code = (float)((1 << bits) - 1), search.midpoint = (float)(1 << (bits - 1));
    fill(&search);
    const int64_t count = search.rows * search.columns, all = search.rows * groups * search.kept;
    float *weight = floats(count, -1000), *importance = floats(search.columns, 0);
    float *scales[2] = {exactly(all * 4), exactly(all * 4)};
    float *values = exactly(count * 4);
    uint8_t *zeros[2] = {exactly(all), exactly(all)}, *codes[2] = {exactly(count), exactly(count)};
    search.weight = weight, search.importance = importance;
    for (int i = 0; i < 2; i++) {
        search.scales = scales[i], search.zeros = zeros[i];
        const GroupEncoding encoding = {search.rows, search.columns, search.group, weight, scales[i], zeros[i], search.max_code, codes[i], values};
        if (ranges_search(&search, i ? set : SCALAR) || groups_encode(&encoding, i ? set : SCALAR)) exit(FAILED_STATUS);
    }
    const int same = !memcmp(scales[0], scales[1], (size_t)all * 4) && !memcmp(zeros[0], zeros[1], (size_t)all) &&
                     !memcmp(codes[0], codes[1], (size_t)count);
    for (int i = 0; i < 2; i++) free(scales[i]), free(zeros[i]), free(codes[i]);
    free(weight), free(importance), free(values);
    return same;
}

static int compare_learned(int set) {
    const int64_t groups = 1 + draw(4), rows = 1 + draw(40), group = 1 + draw(70), count = rows * groups * group;
    const int64_t all = rows * groups, max_code = (1 << (2 + draw(7))) - 1;
    float *latent = floats(count, -1000), *gradient = floats(count, -1000), *scales = floats(all, 1), *zeros = exactly(all * 4);
    float *offset[2] = {floats(count, -1000), exactly(count * 4)}, *values[2] = {exactly(count * 4), exactly(count * 4)};
    float *sums[2] = {exactly(all * 8), exactly(all * 8)};
    for (int64_t i = 0; i < all; i++) zeros[i] = (float)draw(max_code + 1);
    for (int64_t i = 0; i < count; i++) offset[0][i] /= 2;
    memcpy(offset[1], offset[0], (size_t)count * 4);
    for (int i = 0; i < 2; i++) {
        const LearnedRounding weight = {rows, groups * group, group, latent, offset[i], scales, zeros, (float)max_code, values[i], gradient,
                                        0.1f, 0.5f, sums[i], sums[i] + all};
        if (learned_values(&weight, i ? set : SCALAR) || learned_step(&weight, i ? set : SCALAR)) exit(FAILED_STATUS);
    }
    const int same = !memcmp(values[0], values[1], (size_t)count * 4) && !memcmp(offset[0], offset[1], (size_t)count * 4) &&
                     !memcmp(sums[0], sums[1], (size_t)all * 8);
    for (int i = 0; i < 2; i++) free(offset[i]), free(values[i]), free(sums[i]);
    free(latent), free(gradient), free(scales), free(zeros);
    return same;
}

int main(void) {
    pool_set_threads(3);
    for (int set = 0; set <= native_best_instruction_set(); set++)
        for (int i = 0; i < CASES; i++)
            if (!compare(set) || !compare_learned(set)) {
                fprintf(stderr, "set %d differs in case %d\n", set, i);
                return FAILED_NUMBERS;
            }
    return 0;
}
