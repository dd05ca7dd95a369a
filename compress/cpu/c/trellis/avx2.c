#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>

#define TARGET FOR_AVX2
enum { PER_VECTOR = 8, MOST_ROWS = 6 };
#include "trellis/kernel.h"
#include "trellis/search_parts.h"

INLINE TARGET Floats floats_fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE TARGET Words byte_sums(Words words) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)words, _mm256_set1_epi8(1));
    return (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) + 1024;
}

#include "trellis/kernel.inc"
#include "trellis/search.inc"

TARGET void turn_row_avx2(void *call, int64_t row) { turn_inputs(call, row); }
TARGET void multiply_block_avx2(void *call, int64_t chunk) { multiply_block(call, chunk); }
TARGET void search_tiles_avx2(void *call, int64_t chunk) { search_tiles(call, chunk); }

#endif
