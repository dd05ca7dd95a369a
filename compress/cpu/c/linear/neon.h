/* Vectors of NEON, which all 64-bit ARM processors have. Who includes this defines TARGET. */
#include <arm_neon.h>

#define PER_VECTOR 4
#define VECTORS 2
#define MOST_ROWS 6
#include "linear/vectors.h"

typedef uint8x16x4_t Table; /* the first bytes of the entries, the second ones, ... */

INLINE Floats floats_fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
INLINE Floats floats_of_float16(const uint16_t *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
INLINE Words words_of_bytes(const uint8_t *from) { return (Words){from[0], from[1], from[2], from[3]}; }

/* Codes of 8 bits are signed bytes once 128 is taken from them; this is what their products then lack. */
INLINE Words words_lacking(Words q8) { return (Words)vpaddlq_s16(vpaddlq_s8((int8x16_t)q8)) << 7; }
/* Two products of signed bytes fit into 16 bits. */
INLINE Words words_dot(Words sum, Words codes, Words q8, int bits) {
    const int8x16_t a = (int8x16_t)(bits == 8 ? codes ^ 0x80808080 : codes), b = (int8x16_t)q8;
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    if (bits == 8) sum += words_lacking(q8);
    return (Words)vpadalq_s16((int32x4_t)sum, pairs);
}

INLINE Table table_load(const float *table) { return vld4q_u8((const uint8_t *)table); }
/* Bytes of 16 entries are looked up at once, for four codes of each word; those of one code are then put together. What
 * does not depend on the code is computed once for all four. */
INLINE Floats table_look_up(Table table, Words word, int shift) {
    const uint8x16_t codes = (uint8x16_t)(word >> shift % 8 & 0x0f0f0f0f);
    const uint8x16_t first = vqtbl1q_u8(table.val[0], codes), second = vqtbl1q_u8(table.val[1], codes);
    const uint8x16_t third = vqtbl1q_u8(table.val[2], codes), fourth = vqtbl1q_u8(table.val[3], codes);
    const int odd = shift / 8 % 2;
    const uint16x8_t low = (uint16x8_t)(odd ? vtrn2q_u8(first, second) : vtrn1q_u8(first, second));
    const uint16x8_t high = (uint16x8_t)(odd ? vtrn2q_u8(third, fourth) : vtrn1q_u8(third, fourth));
    return (Floats)(shift >= 16 ? vtrn2q_u16(low, high) : vtrn1q_u16(low, high));
}

INLINE Floats floats_quad(const float *from) { return floats_load(from); }
INLINE Floats floats_pick(Floats quad, Words word, int shift) {
    const Words bytes = (word >> shift & 3) * 0x04040404 + 0x03020100;
    return (Floats)vqtbl1q_u8((uint8x16_t)quad, (uint8x16_t)bytes);
}
INLINE Floats floats_at_place(Words word, int shift, int place, Floats x) {
    return (Floats)(vceqq_u32(word >> shift & 3, words_all((uint32_t)place)) & (Words)x);
}

#include "linear/kernel.inc"
