/* Runs pages, attention, the ops between linears and the column loop with every instruction set on buffers of exactly
 * their size. Numbers are checked elsewhere; here equal instruction sets must agree roughly, and nothing may be read or
 * written beside its place. Built with sanitizers by test_sanitizers.py. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/latent.h"
#include "attention/latent_heads.h"
#include "gptq/gptq.h"
#include "layers/norm_rope_act.h"
#include "common/thread_pool.h"
#include "driver.h"

enum { CASES = 16 };

/* Bfloat16 numbers between -2 and 2. */
static uint16_t *numbers(int64_t count) {
    uint16_t *made = exactly(count * 2);
    for (int64_t i = 0; i < count; i++) {
        const float x = (float)(draw(257) - 128) / 64;
        memcpy(&made[i], (const char *)&x + 2, 2);
    }
    return made;
}

static float *floats(int64_t count) {
    float *made = exactly(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = (float)(draw(2001) - 1000) / 1000;
    return made;
}

static float value(uint16_t half) {
    float x = 0;
    memcpy((char *)&x + 2, &half, 2);
    return x;
}

/* Numbers of both kinds. */
static void *heads_of(int64_t wide, int64_t count) { return wide ? (void *)floats(count) : (void *)numbers(count); }
static float head_value(int64_t wide, const void *heads, int64_t i) {
    return wide ? ((const float *)heads)[i] : value(((const uint16_t *)heads)[i]);
}

static int attend(int set) {
    static const int64_t block_sizes[] = {16, 32, 64};
    KvPages pages = {.kv_heads = 1 + draw(3), .head_dim = 32 * (1 + draw(8)), .block_size = block_sizes[draw(3)]};
    const int64_t wide = draw(3) == 0, widths[] = {wide ? 32 : 16, 8, 4}, itemsize = wide ? 4 : 2;
    pages.key_bits = widths[draw(3)], pages.value_bits = widths[draw(3)];
    const int64_t length = draw(4) ? 1 + draw(600) : 2000 + draw(200), most = length < 2000 ? 40 : 3;
    const int64_t tokens = 1 + draw(length < most ? length : most);
    const int64_t num_blocks = (length + pages.block_size - 1) / pages.block_size, heads = pages.kv_heads * (1 + draw(9));
    const int64_t cells = num_blocks * pages.kv_heads, row = pages.kv_heads * pages.head_dim;
    pages.keys = calloc((size_t)cells, (size_t)head_bytes(&pages, pages.key_bits));
    pages.values = calloc((size_t)cells, (size_t)head_bytes(&pages, pages.value_bits));
    pages.key_scales = pages.key_bits >= 16 ? NULL : calloc((size_t)cells, (size_t)(4 * pages.block_size));
    pages.value_scales = pages.value_bits >= 16 ? NULL : calloc((size_t)cells, (size_t)(4 * pages.block_size));
    int64_t *slots = exactly(length * 8), *blocks = exactly(num_blocks * 8);
    for (int64_t i = 0; i < num_blocks; i++) blocks[i] = num_blocks - 1 - i;
    for (int64_t i = 0; i < length; i++)
        slots[i] = blocks[i / pages.block_size] * pages.block_size + i % pages.block_size;
    const int64_t count = tokens * heads * pages.head_dim;
    void *key = heads_of(wide, length * row), *val = heads_of(wide, length * row), *query = heads_of(wide, count);
    const int64_t queries = draw(3);
    void *asked = heads_of(wide, length * queries * pages.head_dim);
    uint16_t *norm = numbers((queries + pages.kv_heads) * pages.head_dim);
    uint16_t *cos = numbers(length * pages.head_dim), *sin = numbers(length * pages.head_dim);
    KvStep step = {.pages = &pages, .rows = length, .heads = queries, .slots = slots, .query = asked, .key = key, .value = val};
    step.query_row = queries * pages.head_dim, step.key_row = step.value_row = row, step.eps = 1e-5f, step.hadamard = draw(2);
    step.wide = (int32_t)wide;
    if (!wide && draw(2)) step.norm = norm;
    if (!wide && draw(2)) step.cos = cos, step.sin = sin;
    if (kv_store(&step, set)) exit(FAILED_STATUS);
    free(asked), free(norm), free(cos), free(sin);
    const Span span = {0, tokens, 0, length - tokens};
    void *first = exactly(count * itemsize), *other = exactly(count * itemsize);
    uint64_t *ancestors = exactly(tokens * 8); /* of guesses in a tree, the first tokens of a span */
    for (int64_t i = 0; i < tokens; i++) ancestors[i] = 1 | 1ull << i | ((uint64_t)draw(1 << 20) & ((1ull << i) - 1));
    PagedAttention job = {.pages = &pages, .heads = heads, .window = draw(2) ? 0 : 1 + draw(300), .scale = 0.1f, .query = query};
    job.query_row = heads * pages.head_dim, job.out = first, job.num_spans = 1, job.spans = &span, job.blocks = blocks;
    job.ancestors = draw(2) ? ancestors : NULL, job.wide = (int32_t)wide;
    int wrong = paged_attention(&job, SCALAR) ? FAILED_STATUS : 0;
    job.out = other;
    for (int other_set = SCALAR; !wrong && other_set <= native_best_instruction_set(); other_set++) {
        if (paged_attention(&job, other_set)) wrong = FAILED_STATUS;
        for (int64_t i = 0; i < count; i++)
            if (!(fabsf(head_value(wide, first, i) - head_value(wide, other, i)) < 0.05f)) wrong = FAILED_NUMBERS;
    }
    free(pages.keys), free(pages.values), free(pages.key_scales), free(pages.value_scales), free(slots), free(blocks);
    free(key), free(val), free(query), free(first), free(other), free(ancestors);
    return wrong;
}

/* Latents, or rotated keys; scales of 0.0156 and offsets of 0. */
static LatentPart latent_part(int64_t size, int64_t format, int64_t slots) {
    const int64_t bytes = format == LATENT_EXACT ? 2 * size : format == LATENT_INT4 ? size / 2 : size;
    uint8_t *codes = format == LATENT_EXACT ? (uint8_t *)numbers(slots * size) : exactly(slots * bytes);
    for (int64_t i = 0; format != LATENT_EXACT && i < slots * bytes; i++) codes[i] = (uint8_t)draw(119);
    const int64_t count = format == LATENT_EXACT ? 0 : format == LATENT_FP8 ? slots : 2 * slots;
    uint16_t *scales = exactly(count * 2);
    for (int64_t i = 0; i < count; i++) scales[i] = format != LATENT_FP8 && i % 2 ? 0 : 0x2400;
    return (LatentPart){size, format, codes, scales};
}

static int attend_latents(int set) {
    const int64_t rank = 2 * (1 + draw(256)), rotated = 2 * (1 + draw(40)), block_size = 4 << draw(4);
    const int64_t width = (rank + rotated + 31) / 32 * 32, heads = 1 + draw(70);
    const int64_t length = 1 + draw(1100), tokens = 1 + draw(length < 5 ? length : 5);
    const int64_t num_blocks = (length + block_size - 1) / block_size, count = tokens * heads * width;
    int64_t *blocks = exactly(num_blocks * 8);
    for (int64_t i = 0; i < num_blocks; i++) blocks[i] = num_blocks - 1 - i;
    uint16_t *query = numbers(count), *first = exactly(count * 2), *other = exactly(count * 2);
    for (int64_t i = 0; i < count; i++) query[i] = i % width < rank + rotated ? query[i] : 0;
    const Span span = {0, tokens, 0, length - tokens};
    LatentAttention job = {.width = width, .block_size = block_size};
    job.attention = (PagedAttention){.heads = heads, .window = draw(2) ? 0 : 1 + draw(700), .scale = 0.02f, .query = query};
    job.attention.query_row = heads * width, job.attention.num_spans = 1, job.attention.spans = &span;
    job.attention.blocks = blocks, job.attention.out = first;
    job.latents = latent_part(rank, draw(4), num_blocks * block_size);
    job.keys = latent_part(rotated, draw(4), num_blocks * block_size);
    int wrong = latent_attention(&job, SCALAR) ? FAILED_STATUS : 0;
    job.attention.out = other;
    if (!wrong && latent_attention(&job, set)) wrong = FAILED_STATUS;
    for (int64_t i = 0; i < count; i++)
        if (!(fabsf(value(first[i]) - value(other[i])) <= 0.05f + 0.02f * fabsf(value(first[i])))) wrong = FAILED_NUMBERS;
    free(blocks), free(query), free(first), free(other);
    free((void *)job.latents.codes), free((void *)job.latents.scales), free((void *)job.keys.codes), free((void *)job.keys.scales);
    return wrong;
}

/* Queries of one head in columns of weights that are all 0.5, against their sums. */
static int multiply_heads(int set) {
    LatentHeads weights = {.heads = 1 + draw(4), .own = 1 + draw(20), .value_dim = 1 + draw(20), .rank = 32 * (1 + draw(16))};
    weights.bits = draw(2) ? 4 : 8, weights.group = draw(2) ? 32 : weights.rank;
    const int64_t per_head = weights.own + weights.value_dim, count = weights.heads * per_head, rows = 1 + draw(40);
    const int64_t groups = count * weights.rank / weights.group, bytes = count * weights.rank * weights.bits / 8;
    uint8_t *codes = exactly(bytes), *zeros = exactly(groups);
    float *scales = exactly(groups * 4);
    memset(codes, weights.bits == 4 ? 0x77 : 7, (size_t)bytes), memset(zeros, 5, (size_t)groups);
    for (int64_t i = 0; i < groups; i++) scales[i] = 0.25f;
    weights.codes = codes, weights.scales = scales, weights.zeros = zeros;
    const int64_t from_row = weights.heads * weights.own;
    uint16_t *query = numbers(rows * from_row), *sums = numbers(rows * weights.heads * weights.rank);
    uint16_t *absorbed = exactly(rows * weights.heads * weights.rank * 2), *values = exactly(rows * weights.heads * weights.value_dim * 2);
    uint16_t *dense = exactly(count * weights.rank * 2);
    LatentProduct product = {&weights, rows, query, from_row, weights.own, absorbed};
    int wrong = absorb_queries(&product, set) ? FAILED_STATUS : 0;
    product.from = sums, product.from_row = weights.heads * weights.rank, product.from_head = weights.rank, product.to = values;
    if (latent_values(&product, set)) wrong = FAILED_STATUS;
    product.to = dense, product.rows = weights.heads;
    if (unpack_latent_heads(&product, set)) wrong = FAILED_STATUS;
    for (int64_t i = 0; i < count * weights.rank; i++)
        if (value(dense[i]) != 0.5f) wrong = FAILED_NUMBERS;
    for (int64_t i = 0; i < rows * weights.heads * weights.rank; i++) {
        float sum = 0;
        for (int64_t k = 0; k < weights.own; k++) sum += 0.5f * value(query[i / weights.rank * weights.own + k]);
        if (!(fabsf(sum - value(absorbed[i])) < 0.1f)) wrong = FAILED_NUMBERS;
    }
    free(codes), free(zeros), free(scales), free(query), free(sums), free(absorbed), free(values), free(dense);
    return wrong;
}

static int glue(int set) {
    const int64_t rows = 1 + draw(30), size = 16 * (1 + draw(40)), heads = 1 + draw(5), dim = 32 * (1 + draw(8));
    uint16_t *hidden = numbers(rows * size), *update = numbers(rows * size), *weight = numbers(size);
    float *wide = calloc((size_t)size, sizeof *wide);
    uint16_t *gate_up = numbers(rows * 2 * size), *out = exactly(rows * size * 2);
    uint16_t *x = numbers(rows * heads * dim), *norm = numbers(heads * dim), *cos = numbers(rows * dim), *sin = numbers(rows * dim);
    const AddNorm add = {rows, size, hidden, draw(2) ? update : NULL, weight, 1e-5f, out, draw(2) ? wide : NULL};
    const Rotate turn = {rows, heads, dim, x, heads * dim, draw(2) ? norm : NULL, 1e-5f, cos, sin};
    const ActivateMultiply gate = {rows, size, gate_up, out, {(int32_t)draw(3), 1.702f, 7}};
    const int wrong = add_rms_norm(&add, set) || rotate(&turn, set) || activate_and_mul(&gate, set);
    free(wide), free(hidden), free(update), free(weight), free(gate_up), free(out), free(x), free(norm), free(cos), free(sin);
    return wrong ? FAILED_STATUS : 0;
}

static int columns(int set) {
    const int64_t outputs = 1 + draw(150), total = 64, groups = 2;
    ColumnStretch stretch = {.outputs = outputs, .feedback_row = total, .feedback_column = 1, .max_code = 15};
    stretch.count = 8 * (1 + draw(6)), stretch.first = draw(2) ? 0 : total - stretch.count;
    float *targets = floats(total * outputs), *errors = floats(total * outputs), *feedback = floats(total * total);
    float *scale = exactly(groups * outputs * 4), *zero = exactly(groups * outputs * 4), *spread = floats(total);
    int64_t *group = exactly(total * 8);
    for (int64_t i = 0; i < groups * outputs; i++) scale[i] = 0.1f, zero[i] = (float)draw(16);
    for (int64_t i = 0; i < total; i++) group[i] = i / 32;
    for (int64_t i = 0; i < total * total; i++) feedback[i] *= 0.1f;
    uint8_t *codes = exactly(total * outputs), *kept = exactly(total * outputs);
    memset(kept, 1, (size_t)(total * outputs));
    stretch.targets = targets, stretch.errors = errors, stretch.feedback = feedback, stretch.spread = spread;
    stretch.scale = scale, stretch.zero = zero, stretch.group = group;
    if (draw(2)) stretch.codes = codes;
    if (draw(2)) stretch.kept = kept;
    if (stretch.kept && draw(2)) stretch.pattern_kept = 2, stretch.pattern_of = draw(2) ? 4 : 8;
    const int wrong = columns_change(&stretch, set);
    free(targets), free(errors), free(feedback), free(scale), free(zero), free(spread), free(group), free(codes), free(kept);
    return wrong ? FAILED_STATUS : 0;
}

int main(void) {
    pool_set_threads(3);
    int wrong = 0;
    for (int i = 0; !wrong && i < CASES; i++) {
        const int set = i % (native_best_instruction_set() + 1);
        wrong = attend(set);
        if (!wrong) wrong = attend_latents(set);
        if (!wrong) wrong = multiply_heads(set);
        if (!wrong) wrong = glue(set);
        if (!wrong) wrong = columns(set);
        if (wrong) fprintf(stderr, "case %d failed: %d\n", i, wrong);
    }
    return wrong;
}
