/* Vectors of AVX-512 for linear_runs.h, for whatever TARGET the file that includes this compiles for. */
#ifndef NATIVE_LINEAR_AVX512_H
#define NATIVE_LINEAR_AVX512_H

#include <immintrin.h>

#include "linear_tiles.h"

#define PER_VECTOR 16
#define VECTORS 4

typedef __m512 Floats, Table;
typedef __m512i Words;

INLINE TARGET Floats floats_zero(void) { return _mm512_setzero_ps(); }
INLINE TARGET Floats floats_all(float x) { return _mm512_set1_ps(x); }
INLINE TARGET Floats floats_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE TARGET void floats_store(float *to, Floats x) { _mm512_storeu_ps(to, x); }
INLINE TARGET Floats floats_add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE TARGET Floats floats_mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE TARGET Floats floats_fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE TARGET Floats floats_of(Words x) { return _mm512_cvtepi32_ps(x); }
INLINE TARGET Floats floats_from_bits(Words x) { return _mm512_castsi512_ps(x); }

INLINE TARGET Words words_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE TARGET Words words_load(const uint32_t *from) { return _mm512_loadu_si512(from); }
INLINE TARGET Words words_sub(Words a, Words b) { return _mm512_sub_epi32(a, b); }
INLINE TARGET Words words_mul(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
INLINE TARGET Words words_code(Words word, int shift, int bits) {
    return _mm512_and_si512(_mm512_srli_epi32(word, (unsigned)shift), words_all((1 << bits) - 1));
}
INLINE TARGET Words words_high_half(Words word, int shift) {
    return shift ? _mm512_and_si512(word, words_all((int32_t)0xffff0000)) : _mm512_slli_epi32(word, 16);
}
INLINE TARGET Words words_bytes(Words word, int shift, int bits) {
    if (bits == 8) return word;
    return _mm512_and_si512(_mm512_srli_epi16(word, (unsigned)shift), _mm512_set1_epi8((char)((1 << bits) - 1)));
}
INLINE TARGET Words words_dot(Words sum, Words codes, int32_t levels) {
    return _mm512_dpbusd_epi32(sum, codes, words_all(levels));
}

/* Lookups see only the low bits of an index, and tables of fewer codes repeat themselves: no mask is needed. */
INLINE TARGET Table table_load(const float *table) { return _mm512_loadu_ps(table); }
INLINE TARGET Floats table_look_up(Table table, Words word, int shift) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(word, (unsigned)shift), table);
}

INLINE TARGET Words load_bytes(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
INLINE TARGET Floats load_scale(const LinearWeight *weight, int64_t index) {
    if (weight->scale_type == FLOAT32) return floats_load((const float *)weight->scales + index);
    const __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)weight->scales + index));
    if (weight->scale_type == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE TARGET Words words_half(Words word, int half) { return half ? _mm512_srli_epi32(word, 16) : word; }
INLINE TARGET Floats floats_quad(const float *from) { return _mm512_broadcast_f32x4(_mm_loadu_ps(from)); }
/* Picks see only the low bits. */
INLINE TARGET Floats floats_pick(Floats quad, Words word, int shift) {
    return _mm512_permutevar_ps(quad, _mm512_srli_epi32(word, (unsigned)shift));
}
INLINE TARGET Floats floats_at_place(Words word, int shift, int place, Floats x) {
    return _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(words_code(word, shift, 2), words_all(place)), x);
}

#include "linear_runs.h"
#include "linear_sparse.h"

#endif
