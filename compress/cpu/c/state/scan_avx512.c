/* The scan in registers of AVX-512. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif

enum { SCAN_WIDTH = 16 };
#include "state/scan.h"

FOR_AVX512 void scan_avx512(void *share, int64_t chunk) { scan_heads(share, chunk); }

#endif
