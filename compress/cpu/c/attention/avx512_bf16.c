/* With products of bfloat16 numbers: pairs are taken as they are. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,f16c")
#endif

#include <immintrin.h>

#include "common/bf16.h"

#define TARGET FOR_AVX512_BF16

typedef uint16_t Factor;
typedef __m512bh Pairs;
typedef __m512i Table;

/* All are exact. The table stands there twice: the upper bits of an index do not matter then. */
INLINE TARGET Table table_of(Lanes codes) {
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh((__m512)codes));
}

INLINE TARGET void store_factors(Factor *to, Lanes factors) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)factors));
}

INLINE TARGET Pairs numbers(__m512i words) { return (Pairs)words; }

/* Float32 pages are multiplied without products of bfloat16 numbers. */
INLINE TARGET Pairs wide(__m512i even, __m512i odd) {
    (void)odd;
    return (Pairs)even;
}

INLINE TARGET Pairs decoded(__m512i words, Table table, int step) {
    return (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, (unsigned)(4 * step)), table);
}

INLINE TARGET __m512 add_products(__m512 sum, Pairs pairs, const Factor *factors) {
    int32_t pair;
    memcpy(&pair, factors, sizeof pair);
    return _mm512_dpbf16_ps(sum, pairs, (__m512bh)_mm512_set1_epi32(pair));
}

#include "attention/avx512.h"

TARGET void attend_part_avx512_bf16(const Part *part, PartResult *result) { attend_part(part, result); }

#endif
