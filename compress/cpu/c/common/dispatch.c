#include "common/dispatch.h"

#if ON_ARM && defined(__linux__)
#include <sys/auxv.h>
#endif

#ifndef NATIVE_DIGEST
#define NATIVE_DIGEST "unknown"
#endif

int native_best_instruction_set(void) {
#if ON_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
    /* Every processor with AVX2 also converts 16-bit floats. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#elif defined(__ARM_FEATURE_DOTPROD)
    return NEON_DOTPROD;
#elif ON_ARM && defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? NEON_DOTPROD : NEON;
#elif ON_ARM
    return NEON;
#endif
    return SCALAR;
}

int resolve_instruction_set(int wanted) {
    int best = native_best_instruction_set();
    if (wanted == INSTRUCTION_SET_BEST) return best;
    return wanted >= SCALAR && wanted <= best ? wanted : -1;
}

const char *native_digest(void) { return NATIVE_DIGEST; }
