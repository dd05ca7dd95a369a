/* Vectors of AVX-512 for kernel.inc, for whatever TARGET the file that includes this compiles for. */
#ifndef NATIVE_LINEAR_AVX512_H
#define NATIVE_LINEAR_AVX512_H

#include <immintrin.h>

#define PER_VECTOR 16
#define VECTORS 4
#define MOST_ROWS 6
#include "linear/vectors.h"

typedef Floats Table;

INLINE TARGET Floats floats_fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE TARGET Floats floats_of_float16(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
INLINE TARGET Words words_of_bytes(const uint8_t *from) {
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}

INLINE TARGET Words words_dot(Words sum, Words codes, Words q8, int bits) {
    (void)bits;
    return (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)q8);
}

/* Lookups see only the low bits of an index, and tables of fewer codes repeat themselves: no mask is needed. */
INLINE TARGET Table table_load(const float *table) { return floats_load(table); }
INLINE TARGET Floats table_look_up(Table table, Words word, int shift) {
    return _mm512_permutexvar_ps((__m512i)(word >> shift), table);
}

INLINE TARGET Words pair_weights(Words word, int step, int bits, Table table) {
    if (bits == 16) return word;
    if (bits == 8) { /* exact in bfloat16: the upper halves say it all */
        const Floats even = floats_centred(word, code_shift(2 * step, 8)), odd = floats_centred(word, code_shift(2 * step + 1, 8));
        return (Words)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)((Words)even >> 16), (__m512i)odd);
    }
    return (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)word, (unsigned)(bits * step)), (__m512i)table);
}

/* As floats_of_e4m3, in halves of words; those below 2^-6 are looked up. */
INLINE TARGET Words e4m3_pairs(Words word, int step, int bits, Table table) {
    (void)bits, (void)table;
    const __m512i code = _mm512_srli_epi16((__m512i)word, (unsigned)(8 * step)), top = _mm512_slli_epi16(code, 8);
    const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i size = _mm512_and_si512(_mm512_srli_epi16(top, 4), _mm512_set1_epi16(0x07f0));
    const __mmask32 is_small = _mm512_testn_epi16_mask(top, _mm512_set1_epi16(0x7800));
    const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(0x3c00));
    const __m512i found = _mm512_mask_permutexvar_epi16(normal, is_small, code, small);
    return (Words)_mm512_or_si512(found, _mm512_and_si512(top, _mm512_set1_epi16((short)0x8000)));
}

INLINE TARGET Floats floats_quad(const float *from) { return _mm512_broadcast_f32x4(_mm_loadu_ps(from)); }
/* Picks see only the low bits. */
INLINE TARGET Floats floats_pick(Floats quad, Words word, int shift) {
    return _mm512_permutevar_ps(quad, (__m512i)(word >> shift));
}
INLINE TARGET Floats floats_at_place(Words word, int shift, int place, Floats x) {
    const __m512i places = (__m512i)(word >> shift & 3);
    return _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(places, _mm512_set1_epi32(place)), x);
}

#endif
