/* The scan in registers of AVX2. */
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#endif

enum { SCAN_WIDTH = 8 };
#include "state/scan.h"

FOR_AVX2 void scan_avx2(void *share, int64_t chunk) { scan_heads(share, chunk); }

#endif
