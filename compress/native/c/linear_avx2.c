#include "linear_tiles.h"

#if ON_X86

#include <immintrin.h>

#define TARGET FOR_AVX2
#define PER_VECTOR 8
#define VECTORS 4

typedef __m256 Floats;
typedef __m256i Words;
typedef struct {
    __m256 low, high;
} Table;

INLINE TARGET Floats floats_zero(void) { return _mm256_setzero_ps(); }
INLINE TARGET Floats floats_all(float x) { return _mm256_set1_ps(x); }
INLINE TARGET Floats floats_load(const float *from) { return _mm256_loadu_ps(from); }
INLINE TARGET void floats_store(float *to, Floats x) { _mm256_storeu_ps(to, x); }
INLINE TARGET Floats floats_add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE TARGET Floats floats_mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE TARGET Floats floats_fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE TARGET Floats floats_of(Words x) { return _mm256_cvtepi32_ps(x); }
INLINE TARGET Floats floats_from_bits(Words x) { return _mm256_castsi256_ps(x); }

INLINE TARGET Words words_all(int32_t x) { return _mm256_set1_epi32(x); }
INLINE TARGET Words words_load(const uint32_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE TARGET Words words_sub(Words a, Words b) { return _mm256_sub_epi32(a, b); }
INLINE TARGET Words words_mul(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
INLINE TARGET Words words_code(Words word, int shift, int bits) {
    return _mm256_and_si256(_mm256_srli_epi32(word, shift), words_all((1 << bits) - 1));
}
INLINE TARGET Words words_high_half(Words word, int shift) {
    return shift ? _mm256_and_si256(word, words_all((int32_t)0xffff0000)) : _mm256_slli_epi32(word, 16);
}
INLINE TARGET Words words_bytes(Words word, int shift, int bits) {
    if (bits == 8) return word;
    return _mm256_and_si256(_mm256_srli_epi16(word, shift), _mm256_set1_epi8((char)((1 << bits) - 1)));
}
/* Even and odd bytes apart, as 16-bit numbers: sums of their products never saturate. */
INLINE TARGET Words words_dot(Words sum, Words codes, int32_t levels) {
    const Words all = words_all(levels);
    const Words even_codes = _mm256_and_si256(codes, words_all(0x00ff00ff)), odd_codes = _mm256_srli_epi16(codes, 8);
    const Words even_levels = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd_levels = _mm256_srai_epi16(all, 8);
    const Words even = _mm256_madd_epi16(even_codes, even_levels), odd = _mm256_madd_epi16(odd_codes, odd_levels);
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

INLINE TARGET Table table_load(const float *table) { return (Table){floats_load(table), floats_load(table + 8)}; }
/* The low three bits look up, the fourth one, moved to the sign, chooses. */
INLINE TARGET Floats table_look_up(Table table, Words word, int shift) {
    const Words index = _mm256_srli_epi32(word, shift);
    const Floats low = _mm256_permutevar8x32_ps(table.low, index), high = _mm256_permutevar8x32_ps(table.high, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

INLINE TARGET Words load_bytes(const uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
INLINE TARGET Floats load_scale(const LinearWeight *weight, int64_t index) {
    if (weight->scale_type == FLOAT32) return floats_load((const float *)weight->scales + index);
    const __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)weight->scales + index));
    if (weight->scale_type == FLOAT16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE TARGET Words words_half(Words word, int half) { return half ? _mm256_srli_epi32(word, 16) : word; }
INLINE TARGET Floats floats_quad(const float *from) { return _mm256_broadcast_ps((const __m128 *)from); }
/* Picks see only the low bits. */
INLINE TARGET Floats floats_pick(Floats quad, Words word, int shift) {
    return _mm256_permutevar_ps(quad, _mm256_srli_epi32(word, shift));
}
INLINE TARGET Floats floats_at_place(Words word, int shift, int place, Floats x) {
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(words_code(word, shift, 2), words_all(place))), x);
}

#include "linear_runs.h"
#include "linear_sparse.h"

RUN_KERNELS_2(float32, 2) RUN_KERNELS_2(float32, 4) RUN_KERNELS_2(float32, 8)
RUN_KERNELS_2(float32, 16) RUN_KERNELS_2(float32, 32) RUN_KERNELS_2(sparse, 3)
RUN_KERNELS_2(levels, 2) RUN_KERNELS_2(levels, 4) RUN_KERNELS_2(levels, 8)
DECODE_KERNEL(float32, 2) DECODE_KERNEL(float32, 4) DECODE_KERNEL(float32, 8) DECODE_KERNEL(float32, 16)
DECODE_KERNEL(sparse, 3)

const KernelKind avx2_float32 = {2, 32,
                                 {RUN_NAMES_2(float32, 2), RUN_NAMES_2(float32, 4), RUN_NAMES_2(float32, 8),
                                  RUN_NAMES_2(float32, 16), RUN_NAMES_2(float32, 32), RUN_NAMES_2(sparse, 3)},
                                 {float32_2, float32_4, float32_8, float32_16, NULL, sparse_3}};
const KernelKind avx2_levels = {2, 0, {RUN_NAMES_2(levels, 2), RUN_NAMES_2(levels, 4), RUN_NAMES_2(levels, 8)}, {NULL}};

#endif
