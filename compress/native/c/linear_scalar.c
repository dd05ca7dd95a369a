/* Plain C for every other processor; compilers make vectors of the inner loops where the processor has any. */
#include "linear_tiles.h"

#define TARGET
#define PER_VECTOR 4
#define VECTORS 2

typedef struct {
    float at[PER_VECTOR];
} Floats;
typedef struct {
    uint32_t at[PER_VECTOR];
} Words;
typedef struct {
    const float *at;
} Table;

INLINE Floats floats_all(float x) { return (Floats){{x, x, x, x}}; }
INLINE Floats floats_zero(void) { return floats_all(0); }
INLINE Floats floats_load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE void floats_store(float *to, Floats x) { memcpy(to, &x, sizeof x); }
INLINE Floats floats_add(Floats a, Floats b) {
    for (int i = 0; i < PER_VECTOR; i++) a.at[i] += b.at[i];
    return a;
}
INLINE Floats floats_mul(Floats a, Floats b) {
    for (int i = 0; i < PER_VECTOR; i++) a.at[i] *= b.at[i];
    return a;
}
/* Two roundings: a fused operation would be a call of a function here. */
INLINE Floats floats_fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < PER_VECTOR; i++) c.at[i] += a.at[i] * b.at[i];
    return c;
}
INLINE Floats floats_of(Words x) {
    Floats y;
    for (int i = 0; i < PER_VECTOR; i++) y.at[i] = (float)(int32_t)x.at[i];
    return y;
}
INLINE Floats floats_from_bits(Words x) {
    Floats y;
    memcpy(&y, &x, sizeof y);
    return y;
}

INLINE Words words_all(int32_t x) {
    const uint32_t word = (uint32_t)x;
    return (Words){{word, word, word, word}};
}
INLINE Words words_load(const uint32_t *from) {
    Words x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE Words words_sub(Words a, Words b) {
    for (int i = 0; i < PER_VECTOR; i++) a.at[i] -= b.at[i];
    return a;
}
INLINE Words words_mul(Words a, Words b) {
    for (int i = 0; i < PER_VECTOR; i++) a.at[i] *= b.at[i];
    return a;
}
INLINE Words words_code(Words word, int shift, int bits) {
    for (int i = 0; i < PER_VECTOR; i++) word.at[i] = word.at[i] >> shift & ((1u << bits) - 1);
    return word;
}
INLINE Words words_high_half(Words word, int shift) {
    for (int i = 0; i < PER_VECTOR; i++) word.at[i] = word.at[i] >> shift << 16;
    return word;
}
INLINE Words words_bytes(Words word, int shift, int bits) {
    for (int i = 0; i < PER_VECTOR; i++) word.at[i] = word.at[i] >> shift & ((1u << bits) - 1) * 0x01010101u;
    return word;
}
INLINE Words words_dot(Words sum, Words codes, int32_t levels) {
    for (int i = 0; i < PER_VECTOR; i++)
        for (int byte = 0; byte < 4; byte++) {
            const int32_t code = (int32_t)(codes.at[i] >> 8 * byte & 0xff);
            sum.at[i] += (uint32_t)(code * (int8_t)((uint32_t)levels >> 8 * byte));
        }
    return sum;
}

INLINE Table table_load(const float *table) { return (Table){table}; }
INLINE Floats table_look_up(Table table, Words word, int shift) {
    Floats x;
    for (int i = 0; i < PER_VECTOR; i++) x.at[i] = table.at[word.at[i] >> shift & 15];
    return x;
}

INLINE Words load_bytes(const uint8_t *from) {
    Words x;
    for (int i = 0; i < PER_VECTOR; i++) x.at[i] = from[i];
    return x;
}
INLINE Floats load_scale(const LinearWeight *weight, int64_t index) {
    if (weight->scale_type == FLOAT32) return floats_load((const float *)weight->scales + index);
    const uint16_t *from = (const uint16_t *)weight->scales + index;
    Floats x;
    for (int i = 0; i < PER_VECTOR; i++)
        x.at[i] = weight->scale_type == FLOAT16 ? float_of_float16(from[i]) : float_of_bfloat16(from[i]);
    return x;
}

INLINE Words words_half(Words word, int half) {
    for (int i = 0; i < PER_VECTOR; i++) word.at[i] >>= 16 * half;
    return word;
}
INLINE Floats floats_quad(const float *from) { return floats_load(from); }
INLINE Floats floats_pick(Floats quad, Words word, int shift) {
    Floats x;
    for (int i = 0; i < PER_VECTOR; i++) x.at[i] = quad.at[word.at[i] >> shift & 3];
    return x;
}
INLINE Floats floats_at_place(Words word, int shift, int place, Floats x) {
    for (int i = 0; i < PER_VECTOR; i++) x.at[i] = (word.at[i] >> shift & 3) == (uint32_t)place ? x.at[i] : 0;
    return x;
}

#include "linear_runs.h"
#include "linear_sparse.h"

RUN_KERNEL(float32, 2, 1) RUN_KERNEL(float32, 4, 1) RUN_KERNEL(float32, 8, 1)
RUN_KERNEL(float32, 16, 1) RUN_KERNEL(float32, 32, 1) RUN_KERNEL(sparse, 3, 1)
RUN_KERNEL(levels, 2, 1) RUN_KERNEL(levels, 4, 1) RUN_KERNEL(levels, 8, 1)
DECODE_KERNEL(float32, 2) DECODE_KERNEL(float32, 4) DECODE_KERNEL(float32, 8) DECODE_KERNEL(float32, 16)
DECODE_KERNEL(sparse, 3)

const KernelKind scalar_float32 = {1, 32,
                                   {{float32_2_1}, {float32_4_1}, {float32_8_1}, {float32_16_1}, {float32_32_1}, {sparse_3_1}},
                                   {float32_2, float32_4, float32_8, float32_16, NULL, sparse_3}};
const KernelKind scalar_levels = {1, 0, {{levels_2_1}, {levels_4_1}, {levels_8_1}}, {NULL}};
