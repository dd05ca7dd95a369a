/* Products of adapters in registers of AVX2. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#endif

#include "linear/adapter_rows.h"

FOR_AVX2 void reduce_avx2(void *call, int64_t chunk) { reduce_rows(call, chunk); }
FOR_AVX2 void expand_avx2(void *call, int64_t chunk) { expand_rows(call, chunk); }

#endif
