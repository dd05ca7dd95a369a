#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif

#include <immintrin.h>

#define TARGET FOR_AVX512
enum { PER_VECTOR = 16, MOST_ROWS = 8 };
#include "trellis/kernel.h"
#include "trellis/search_parts.h"

INLINE TARGET Floats floats_fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE TARGET Words byte_sums(Words words) {
    return (Words)_mm512_dpbusd_epi32(_mm512_set1_epi32(1024), (__m512i)words, _mm512_set1_epi8(1));
}

#include "trellis/kernel.inc"
#include "trellis/search.inc"

TARGET void turn_row_avx512(void *call, int64_t row) { turn_inputs(call, row); }
TARGET void multiply_block_avx512(void *call, int64_t chunk) { multiply_block(call, chunk); }
TARGET void search_tiles_avx512(void *call, int64_t chunk) { search_tiles(call, chunk); }

#endif
