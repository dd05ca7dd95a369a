/* Without products of bfloat16 numbers: members of pairs are widened, and products are float32. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif

#include <immintrin.h>

#include "common/bf16.h"

#define TARGET FOR_AVX512

typedef float Factor;
typedef __m512 Table;
typedef struct {
    __m512 even, odd;
} Pairs;

INLINE TARGET Table table_of(Lanes codes) { return (Table)codes; }

INLINE TARGET void store_factors(Factor *to, Lanes factors) { lanes_store(to, factors); }

INLINE TARGET Pairs numbers(__m512i words) {
    const __m512i odd = _mm512_and_si512(words, _mm512_set1_epi32((int32_t)0xffff0000));
    return (Pairs){_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_castsi512_ps(odd)};
}

/* Pairs of thirty-two float32 numbers. */
INLINE TARGET Pairs wide(__m512i even, __m512i odd) {
    return (Pairs){_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)};
}

/* Lookups see only the low bits of an index. */
INLINE TARGET Pairs decoded(__m512i words, Table table, int step) {
    const __m512i even = _mm512_srli_epi32(words, (unsigned)(4 * step));
    const __m512i odd = _mm512_srli_epi32(words, (unsigned)(4 * step + 16));
    return (Pairs){_mm512_permutexvar_ps(even, table), _mm512_permutexvar_ps(odd, table)};
}

INLINE TARGET __m512 add_products(__m512 sum, Pairs pairs, const Factor *factors) {
    sum = _mm512_fmadd_ps(pairs.even, _mm512_set1_ps(factors[0]), sum);
    return _mm512_fmadd_ps(pairs.odd, _mm512_set1_ps(factors[1]), sum);
}

#include "attention/avx512.h"

TARGET void attend_part_avx512(const Part *part, PartResult *result) { attend_part(part, result); }

#endif
