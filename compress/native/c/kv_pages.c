#include "kv_pages.h"

#include <math.h>

#include "numbers.h"
#include "pool.h"

static const float FLOAT16_MAX = 65504.0f;

typedef struct {
    const KvPages *pages;
    int64_t tokens;
    const int64_t *slots;
    const uint16_t *key, *value;
    int64_t key_row, value_row;
} Write;

/* Codes of one head of one token. */
typedef struct {
    uint8_t code[LONGEST_HEAD];
    uint16_t scale, offset;
} Quantized;

/* Saturates where float16 ends; what is not finite becomes NaN. */
static uint16_t stored(float x) {
    if (!isfinite(x)) return 0x7e00;
    return float16_of(x > FLOAT16_MAX ? FLOAT16_MAX : x < -FLOAT16_MAX ? -FLOAT16_MAX : x);
}

static void quantize(const uint16_t *head, int64_t size, int64_t bits, Quantized *out) {
    const float levels = (float)((1 << bits) - 1);
    float low = float_of_bfloat16(head[0]), high = low;
    for (int64_t d = 0; d < size; d++) {
        const float x = float_of_bfloat16(head[d]);
        low = x < low || x != x ? x : low;
        high = x > high || x != x ? x : high;
    }
    out->scale = stored(high / levels - low / levels);
    out->offset = stored(low);
    const float scale = float_of_float16(out->scale), offset = float_of_float16(out->offset);
    for (int64_t d = 0; d < size; d++) {
        float code = scale == 0 ? 0 : (float_of_bfloat16(head[d]) - offset) / scale;
        code = code > 0 ? code : 0; /* NaN, too */
        code = code < levels ? code : levels;
        out->code[d] = (uint8_t)((code + 12582912.0f) - 12582912.0f);
    }
}

static void write_scales(uint16_t *scales, const KvPages *pages, int64_t block, int64_t head, int64_t token,
                         const Quantized *quantized) {
    scales += (block * pages->kv_heads + head) * 2 * pages->block_size + token;
    scales[0] = quantized->scale;
    scales[pages->block_size] = quantized->offset;
}

static void write_key(const KvPages *pages, int64_t block, int64_t head, int64_t token, const uint16_t *x) {
    const int64_t size = pages->head_dim, bits = pages->key_bits;
    uint32_t *words = (uint32_t *)(pages->keys + (block * pages->kv_heads + head) * head_bytes(pages, bits)) + token;
    if (bits == 16) {
        for (int64_t d = 0; d < size; d += 2)
            words[d / 2 * pages->block_size] = x[d] | (uint32_t)x[d + 1] << 16;
        return;
    }
    Quantized quantized;
    quantize(x, size, bits, &quantized);
    write_scales(pages->key_scales, pages, block, head, token, &quantized);
    for (int64_t shift = 0; shift < bits; shift += 4)
        for (int64_t d = 0; d < size; d += 8, words += pages->block_size) {
            uint32_t word = 0;
            for (int64_t j = 0; j < 8; j++) word |= (uint32_t)(quantized.code[d + j] >> shift & 15) << word_bit(j);
            *words = word;
        }
}

static void write_value(const KvPages *pages, int64_t block, int64_t head, int64_t token, const uint16_t *x) {
    const int64_t size = pages->head_dim, bits = pages->value_bits;
    uint8_t *place = pages->values + (block * pages->kv_heads + head) * head_bytes(pages, bits);
    if (bits == 16) {
        uint16_t *pairs = (uint16_t *)place + token / 2 * size * 2 + token % 2;
        for (int64_t d = 0; d < size; d++) pairs[2 * d] = x[d];
        return;
    }
    Quantized quantized;
    quantize(x, size, bits, &quantized);
    write_scales(pages->value_scales, pages, block, head, token, &quantized);
    const int bit = word_bit(token % 8);
    uint32_t *words = (uint32_t *)place + token / 8 * size;
    for (int64_t shift = 0; shift < bits; shift += 4, words += pages->block_size / 8 * size)
        for (int64_t d = 0; d < size; d++)
            words[d] = (words[d] & ~(15u << bit)) | (uint32_t)(quantized.code[d] >> shift & 15) << bit;
}

/* One head of every token: tokens share words of values, heads share nothing. */
static void write_head(void *context, int64_t head) {
    const Write *write = context;
    const KvPages *pages = write->pages;
    for (int64_t t = 0; t < write->tokens; t++) {
        const int64_t block = write->slots[t] / pages->block_size, token = write->slots[t] % pages->block_size;
        write_key(pages, block, head, token, write->key + t * write->key_row + head * pages->head_dim);
        write_value(pages, block, head, token, write->value + t * write->value_row + head * pages->head_dim);
    }
}

void kv_write(const KvPages *pages, int64_t tokens, const int64_t *slots, const uint16_t *key, int64_t key_row,
              const uint16_t *value, int64_t value_row) {
    Write write = {pages, tokens, slots, key, value, key_row, value_row};
    pool_run(write_head, &write, pages->kv_heads);
}
