/* The plain code in registers of AVX2. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#endif

#define LANES_OF_PIECE 8
#include "attention/simd.h"

FOR_AVX2 void attend_part_avx2(const Part *part, PartResult *result) { attend_part(part, result); }

#endif
