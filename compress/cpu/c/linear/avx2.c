#include "common/dispatch.h"

#if ON_X86

#include <immintrin.h>

#define TARGET FOR_AVX2
#define PER_VECTOR 8
#define VECTORS 4
#define MOST_ROWS 2
#define UNDECODED_BLOCKS 2
#include "linear/vectors.h"

typedef struct {
    __m256 low, high;
} Table;

INLINE TARGET Floats floats_fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE TARGET Floats floats_of_float16(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
INLINE TARGET Words words_of_bytes(const uint8_t *from) {
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}

/* Even and odd bytes apart, as 16-bit numbers: sums of their products never saturate. */
INLINE TARGET Words words_dot(Words sum, Words codes, Words q8, int bits) {
    (void)bits;
    const __m256i even_codes = (__m256i)(codes & 0x00ff00ff), odd_codes = _mm256_srli_epi16((__m256i)codes, 8);
    const __m256i even_q8 = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)q8, 8), 8);
    const __m256i odd_q8 = _mm256_srai_epi16((__m256i)q8, 8);
    const __m256i even = _mm256_madd_epi16(even_codes, even_q8), odd = _mm256_madd_epi16(odd_codes, odd_q8);
    return sum + ((Words)even + (Words)odd);
}

INLINE TARGET Table table_load(const float *table) { return (Table){_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)}; }
/* The low three bits look up, the fourth one, moved to the sign, chooses. */
INLINE TARGET Floats table_look_up(Table table, Words word, int shift) {
    const __m256i index = (__m256i)(word >> shift);
    const __m256 low = _mm256_permutevar8x32_ps(table.low, index), high = _mm256_permutevar8x32_ps(table.high, index);
    return _mm256_blendv_ps(low, high, (__m256)((Words)index << 28));
}

INLINE TARGET Floats floats_quad(const float *from) { return _mm256_broadcast_ps((const __m128 *)from); }
/* Picks see only the low bits. */
INLINE TARGET Floats floats_pick(Floats quad, Words word, int shift) {
    return _mm256_permutevar_ps(quad, (__m256i)(word >> shift));
}
INLINE TARGET Floats floats_at_place(Words word, int shift, int place, Floats x) {
    const __m256i places = (__m256i)(word >> shift & 3);
    return (Floats)((__m256i)x & _mm256_cmpeq_epi32(places, _mm256_set1_epi32(place)));
}

#include "linear/kernel.inc"

DECODE_KERNEL(float32, 16)

const KernelKind avx2_float32 = FLOAT32_KERNELS(decode_float32_16);
const KernelKind avx2_q8 = Q8_KERNELS;

#endif
