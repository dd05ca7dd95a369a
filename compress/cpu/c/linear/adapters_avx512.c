/* Products of adapters in registers of AVX-512. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif

#include "linear/adapter_rows.h"

FOR_AVX512 void reduce_avx512(void *call, int64_t chunk) { reduce_rows(call, chunk); }
FOR_AVX512 void expand_avx512(void *call, int64_t chunk) { expand_rows(call, chunk); }

#endif
