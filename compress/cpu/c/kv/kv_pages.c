#include "kv/kv_pages.h"

#include "layers/heads.h"
#include "common/thread_pool.h"

static const float FLOAT16_MAX = 65504.0f;

enum {
    SHARING = 8,     /* neighbouring slots whose values may share words */
    CHUNK = 1 << 14, /* numbers that are worth waking a thread for */
};

/* Which rows a chunk of the pool's is. */
typedef struct {
    const KvStep *step;
    int64_t per_chunk;
} Share;

/* Codes of one head of one token. */
typedef struct {
    uint8_t code[LONGEST_HEAD];
    uint16_t scale, offset;
} Quantized;

/* Saturates where float16 ends; what is not finite becomes NaN. */
INLINE uint16_t stored(float x) {
    if (!isfinite(x)) return 0x7e00;
    return float16_of(x > FLOAT16_MAX ? FLOAT16_MAX : x < -FLOAT16_MAX ? -FLOAT16_MAX : x);
}

INLINE void quantize(const float *head, int64_t size, int64_t bits, Quantized *out) {
    const float max_code = (float)((1 << bits) - 1);
    float low = head[0], high = low;
    for (int64_t d = 0; d < size; d++) {
        const float x = head[d];
        low = x < low || x != x ? x : low;
        high = x > high || x != x ? x : high;
    }
    out->scale = stored(high / max_code - low / max_code);
    out->offset = stored(low);
    const float scale = float_of_float16(out->scale), offset = float_of_float16(out->offset);
    for (int64_t d = 0; d < size; d++) {
        float code = scale == 0 ? 0 : (head[d] - offset) / scale;
        code = code > 0 ? code : 0; /* NaN, too */
        code = code < max_code ? code : max_code;
        out->code[d] = (uint8_t)((code + 12582912.0f) - 12582912.0f);
    }
}

INLINE void write_scales(uint16_t *scales, const KvPages *pages, int64_t block, int64_t head, int64_t token,
                         const Quantized *quantized) {
    scales += (block * pages->kv_heads + head) * 2 * pages->block_size + token;
    scales[0] = quantized->scale;
    scales[pages->block_size] = quantized->offset;
}

INLINE void write_key(const KvPages *pages, int64_t block, int64_t head, int64_t token, const float *x) {
    const int64_t size = pages->head_dim, bits = pages->key_bits;
    uint32_t *words = (uint32_t *)(pages->keys + (block * pages->kv_heads + head) * head_bytes(pages, bits)) + token;
    if (bits == 32) {
        for (int64_t d = 0; d < size; d++) words[d * pages->block_size] = bits_of_float(x[d]);
        return;
    }
    if (bits == 16) { /* bfloat16 numbers, which lose nothing */
        for (int64_t d = 0; d < size; d += 2)
            words[d / 2 * pages->block_size] = bits_of_float(x[d]) >> 16 | (bits_of_float(x[d + 1]) & 0xffff0000u);
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

INLINE void write_value(const KvPages *pages, int64_t block, int64_t head, int64_t token, const float *x) {
    const int64_t size = pages->head_dim, bits = pages->value_bits;
    uint8_t *place = pages->values + (block * pages->kv_heads + head) * head_bytes(pages, bits);
    if (bits == 32) {
        memcpy(place + token * size * (int64_t)sizeof *x, x, (size_t)size * sizeof *x);
        return;
    }
    if (bits == 16) {
        uint16_t *pairs = (uint16_t *)place + token / 2 * size * 2 + token % 2;
        for (int64_t d = 0; d < size; d++) pairs[2 * d] = (uint16_t)(bits_of_float(x[d]) >> 16);
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

/* Norm, rotary embedding and Hadamard rotation of one head, in place. */
INLINE void change_head(const KvStep *step, int64_t row, int64_t head, uint16_t *x) {
    const int64_t size = step->pages->head_dim;
    if (step->norm) normalize(x, step->norm + head * size, size, step->eps, x);
    if (step->cos) rotate_head(x, size, step->cos + row * size, step->sin + row * size);
    if (step->hadamard) hadamard_head(x, size);
}

/* Key of a row as it is stored; and its value. */
INLINE void read_key(const KvStep *step, int64_t row, int64_t head, float *to) {
    const int64_t size = step->pages->head_dim, from = row * step->key_row + head * size;
    if (step->wide) {
        memcpy(to, (const float *)step->key + from, (size_t)size * sizeof *to);
        if (step->hadamard) hadamard_wide(to, size);
        return;
    }
    uint16_t key[LONGEST_HEAD];
    memcpy(key, (const uint16_t *)step->key + from, (size_t)size * sizeof *key);
    change_head(step, row, step->heads + head, key);
    for (int64_t d = 0; d < size; d += LANES) lanes_store(to + d, lanes_load_bfloat16(key + d));
}

INLINE void read_value(const KvStep *step, int64_t row, int64_t head, float *to) {
    const int64_t size = step->pages->head_dim, from = row * step->value_row + head * size;
    for (int64_t d = 0; d < size; d += LANES)
        lanes_store(to + d, step->wide ? lanes_load((const float *)step->value + from + d)
                                       : lanes_load_bfloat16((const uint16_t *)step->value + from + d));
}

INLINE void store_row(const KvStep *step, int64_t row) {
    const KvPages *pages = step->pages;
    const int64_t size = pages->head_dim;
    const int64_t block = step->slots[row] / pages->block_size, token = step->slots[row] % pages->block_size;
    float numbers[LONGEST_HEAD];
    for (int64_t head = 0; head < step->heads; head++) {
        const int64_t place = row * step->query_row + head * size;
        if (!step->wide)
            change_head(step, row, head, (uint16_t *)step->query + place);
        else if (step->hadamard)
            hadamard_wide((float *)step->query + place, size);
    }
    for (int64_t head = 0; head < pages->kv_heads; head++) {
        read_key(step, row, head, numbers);
        write_key(pages, block, head, token, numbers);
        read_value(step, row, head, numbers);
        write_value(pages, block, head, token, numbers);
    }
}

/* The first row of a chunk: tokens whose values share words belong to one chunk. */
INLINE int64_t first_row(const Share *share, int64_t chunk) {
    const KvStep *step = share->step;
    int64_t row = chunk * share->per_chunk;
    while (row > 0 && row < step->rows && step->slots[row] / SHARING == step->slots[row - 1] / SHARING) row++;
    return row < step->rows ? row : step->rows;
}

INLINE void store_rows(void *context, int64_t chunk) {
    const Share *share = context;
    for (int64_t row = first_row(share, chunk); row < first_row(share, chunk + 1); row++) store_row(share->step, row);
}

static void store_scalar(void *share, int64_t chunk) { store_rows(share, chunk); }
#if ON_X86
FOR_AVX2 static void store_avx2(void *share, int64_t chunk) { store_rows(share, chunk); }
FOR_AVX512 static void store_avx512(void *share, int64_t chunk) { store_rows(share, chunk); }
#endif
static const PoolTask STORE[NUM_INSTRUCTION_SETS] = BY_SET(store);

int kv_store(const KvStep *step, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    const int64_t size = (step->heads + 2 * step->pages->kv_heads) * step->pages->head_dim;
    const Share share = {step, CHUNK / size > SHARING ? CHUNK / size : SHARING};
    pool_run(STORE[set], (void *)&share, (step->rows + share.per_chunk - 1) / share.per_chunk);
    return 0;
}
