/* The search and the rounding in registers of AVX-512. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif
#include <immintrin.h>

#include "common/simd.h"

enum { STRIP_WIDTH = 16 };
typedef float Strip __attribute__((vector_size(4 * STRIP_WIDTH)));
typedef int32_t StripBits __attribute__((vector_size(4 * STRIP_WIDTH)));
typedef uint8_t CodeStrip __attribute__((vector_size(STRIP_WIDTH)));

INLINE FOR_AVX512 Strip strip_clamp(Strip x, Strip low, Strip high) {
    return _mm512_min_ps(_mm512_max_ps(x, low), high);
}

#include "rounding/step.h"

FOR_AVX512 TASK_OF(search_rows, RangeSearch, search_row, avx512)
FOR_AVX512 TASK_OF(encode_rows, GroupEncoding, encode_row, avx512)
FOR_AVX512 TASK_OF(value_rows, LearnedRounding, value_row, avx512)
FOR_AVX512 TASK_OF(step_rows, LearnedRounding, step_row, avx512)

#endif
