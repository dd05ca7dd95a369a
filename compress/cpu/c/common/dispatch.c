#include "common/dispatch.h"

#include <stdint.h>

#if ON_ARM && defined(__linux__)
#include <sys/auxv.h>
#endif

#if ON_X86 && defined(__linux__)
#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef NATIVE_DIGEST
#define NATIVE_DIGEST "unknown"
#endif

/* The library uses no set above this one, whatever the machine has; see build.py. */
#ifndef MOST_INSTRUCTION_SET
#define MOST_INSTRUCTION_SET (NUM_INSTRUCTION_SETS - 2)
#endif

#if ON_X86 && defined(__linux__)

/* Bits of cpuid's leaf 1 (register ECX) and 7 (EDX), and of XCR0: state that the operating system keeps for each thread. */
enum { OSXSAVE = 1 << 27, AMX_BF16_TILES = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8_TILES = 1 << 25, TILE_STATE = 3 << 17 };
/* Arguments of arch_prctl: Linux grants the large state of tiles to processes that ask. */
enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 };

static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static const char *find_tiles_refusal(void) {
    if (MOST_INSTRUCTION_SET < AMX) return "this library was compiled for processors without matrix tiles (AMX)";
    const unsigned needed = AMX_BF16_TILES | AMX_TILE | AMX_INT8_TILES;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed)
        return "this processor has no matrix tiles (AMX) of bfloat16 numbers and bytes";
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE) || (enabled_state() & TILE_STATE) != TILE_STATE)
        return "the operating system keeps no state of matrix tiles (AMX): XCR0 lacks bits 17 and 18";
    if (syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA))
        return "the operating system refused matrix tiles (AMX): arch_prctl(ARCH_REQ_XCOMP_PERM) failed";
    return "";
}

static const char *tiles_refusal;

static void ask_for_tiles(void) { tiles_refusal = find_tiles_refusal(); }

const char *native_tiles_refusal(void) {
    static pthread_once_t asked = PTHREAD_ONCE_INIT;
    pthread_once(&asked, ask_for_tiles);
    return tiles_refusal;
}

#else

const char *native_tiles_refusal(void) {
    return "matrix tiles (AMX) are used on x86-64 processors under Linux";
}

#endif

static int best_of_machine(void) {
#if ON_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
        if (!__builtin_cpu_supports("avx512bf16")) return AVX512;
        return *native_tiles_refusal() ? AVX512_BF16 : AMX;
    }
    /* Every processor with AVX2 also converts 16-bit floats. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#elif ON_ARM && defined(__linux__)
    if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return NEON;
    return getauxval(AT_HWCAP2) & HWCAP2_I8MM ? NEON_I8MM : NEON_DOTPROD;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return NEON_I8MM;
#elif defined(__ARM_FEATURE_DOTPROD)
    return NEON_DOTPROD;
#elif ON_ARM
    return NEON;
#endif
    return SCALAR;
}

int native_best_instruction_set(void) {
    const int best = best_of_machine();
    return best < MOST_INSTRUCTION_SET ? best : MOST_INSTRUCTION_SET;
}

int resolve_instruction_set(int wanted) {
    if (wanted == AMX_EMULATED) return wanted;
    const int best = native_best_instruction_set();
    if (wanted == INSTRUCTION_SET_BEST) return best;
    return wanted >= SCALAR && wanted <= best ? wanted : -1;
}

const char *native_digest(void) { return NATIVE_DIGEST; }
