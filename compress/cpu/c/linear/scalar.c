/* Plain C for every other processor. */
#define TARGET
#define PER_VECTOR 4
#define VECTORS 2
#define MOST_ROWS 1
#define UNDECODED_BLOCKS 2
#include "linear/vectors.h"

typedef struct {
    const float *at;
} Table;

/* Two roundings: a fused operation would be a call of a function here. */
INLINE Floats floats_fma(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Floats floats_of_float16(const uint16_t *from) {
    float x[PER_VECTOR];
    for (int i = 0; i < PER_VECTOR; i++) x[i] = float_of_float16(from[i]);
    return floats_load(x);
}
INLINE Words words_of_bytes(const uint8_t *from) { return (Words){from[0], from[1], from[2], from[3]}; }

INLINE Words words_dot(Words sum, Words codes, Words q8, int bits) {
    (void)bits;
    for (int shift = 0; shift < 32; shift += 8)
        sum += (codes >> shift & 255) * (Words)((Integers)(q8 << (24 - shift)) >> 24);
    return sum;
}

INLINE Table table_load(const float *table) { return (Table){table}; }
INLINE Floats table_look_up(Table table, Words word, int shift) {
    uint32_t words[PER_VECTOR];
    float x[PER_VECTOR];
    words_store(words, word);
    for (int i = 0; i < PER_VECTOR; i++) x[i] = table.at[words[i] >> shift & 15];
    return floats_load(x);
}

INLINE Floats floats_quad(const float *from) { return floats_load(from); }
INLINE Floats floats_pick(Floats quad, Words word, int shift) {
    Floats x;
    for (int i = 0; i < PER_VECTOR; i++) x[i] = quad[word[i] >> shift & 3];
    return x;
}
INLINE Floats floats_at_place(Words word, int shift, int place, Floats x) {
    return (Floats)((Words)((word >> shift & 3) == (uint32_t)place) & (Words)x);
}

#include "linear/kernel.inc"

DECODE_KERNEL(float32, 16)

const KernelKind scalar_float32 = FLOAT32_KERNELS(decode_float32_16);
const KernelKind scalar_q8 = Q8_KERNELS;
