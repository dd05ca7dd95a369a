/* Vectors in plain C for kernel.inc. A file that includes this defines floats_fma itself. */
#ifndef NATIVE_LINEAR_PLAIN_H
#define NATIVE_LINEAR_PLAIN_H

#define TARGET
#include "linear/vectors.h"

typedef struct {
    const float *at;
} Table;

INLINE Floats floats_of_float16(const uint16_t *from) {
    float x[PER_VECTOR];
    for (int i = 0; i < PER_VECTOR; i++) x[i] = float_of_float16(from[i]);
    return floats_load(x);
}
INLINE Words words_of_bytes(const uint8_t *from) {
    Words x;
    for (int i = 0; i < PER_VECTOR; i++) x[i] = from[i];
    return x;
}

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

INLINE Words pair_weights(Words word, int step, int bits, Table table) {
    if (bits == 16) return word;
    uint32_t words[PER_VECTOR];
    words_store(words, word);
    for (int i = 0; i < PER_VECTOR; i++) {
        uint32_t pair = 0;
        for (int k = 0; k < 2; k++) {
            const uint32_t code = words[i] >> code_shift(2 * step + k, bits);
            const uint16_t *values = (const uint16_t *)table.at;
            pair |= (uint32_t)(bits == 8 ? bfloat16_of((float)((int)(code & 255) - 128)) : values[code & 15]) << 16 * k;
        }
        words[i] = pair;
    }
    return words_load(words);
}

INLINE Words e4m3_pairs(Words word, int step, int bits, Table table) {
    (void)bits, (void)table;
    const Words even = (Words)floats_of_e4m3(word, code_shift(2 * step, 8));
    return even >> 16 | (Words)floats_of_e4m3(word, code_shift(2 * step + 1, 8)); /* exact in bfloat16 */
}

INLINE Floats floats_quad(const float *from) {
    Floats x;
    for (int i = 0; i < PER_VECTOR; i++) x[i] = from[i % 4];
    return x;
}
INLINE Floats floats_pick(Floats quad, Words word, int shift) {
    Floats x;
    for (int i = 0; i < PER_VECTOR; i++) x[i] = quad[i / 4 * 4 + (word[i] >> shift & 3)];
    return x;
}
INLINE Floats floats_at_place(Words word, int shift, int place, Floats x) {
    return (Floats)((Words)((word >> shift & 3) == (uint32_t)place) & (Words)x);
}

#endif
