/* Which instruction set a kernel runs with. Every kernel takes the wanted one as an argument (INSTRUCTION_SET_BEST in
 * production, a certain one in tests), turns it into an index with `resolve_instruction_set`, and looks its function up
 * in a table of NUM_INSTRUCTION_SETS entries, from the slowest to the fastest. Functions are compiled for their set by
 * attribute, so one library serves every machine of an architecture.
 *
 * The last entry, AMX_EMULATED, is not a set of any machine: the kernels of AMX in plain C, for tests on every machine. It is
 * never the best one. */
#ifndef NATIVE_DISPATCH_H
#define NATIVE_DISPATCH_H

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline, unused))

#if defined(__x86_64__)
#define ON_X86 1
#define ON_ARM 0
/* AVX2 with FMA and 16-bit floats; AVX-512 with byte dot products (Cascade Lake, Ice Lake); with bfloat16 dot products as
 * well (Zen 4, Cooper Lake); with matrix tiles of bytes and of bfloat16 numbers, too (Sapphire Rapids and later). */
enum { SCALAR, AVX2, AVX512, AVX512_BF16, AMX, AMX_EMULATED, NUM_INSTRUCTION_SETS, FIRST_WITH_TILES = AMX };
#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")))
#define FOR_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,f16c")))
#define FOR_AMX                                                                                                       \
    __attribute__((                                                                                                   \
        target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,f16c")))
/* The table of a function in plain C that was compiled as name_scalar, name_avx2 and name_avx512. */
#define BY_SET(name)                                                                                                  \
    {name##_scalar, name##_avx2, name##_avx512, name##_avx512, name##_avx512, name##_scalar}
#elif defined(__aarch64__)
#define ON_X86 0
#define ON_ARM 1
/* Every processor has NEON, which plain C is compiled for; byte dot products came with Neoverse N1 and Apple's A13, matrix
 * products of bytes (i8mm) with Neoverse V1 and Apple's M2. */
enum { SCALAR, NEON, NEON_DOTPROD, NEON_I8MM, AMX_EMULATED, NUM_INSTRUCTION_SETS, FIRST_WITH_TILES = AMX_EMULATED };
#if defined(__clang__)
#define FOR_NEON_DOTPROD __attribute__((target("dotprod")))
#define FOR_NEON_I8MM __attribute__((target("dotprod,i8mm")))
#else
#define FOR_NEON_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#define FOR_NEON_I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#endif
#define BY_SET(name) {name##_scalar, name##_scalar, name##_scalar, name##_scalar, name##_scalar}
#else
#define ON_X86 0
#define ON_ARM 0
enum { SCALAR, AMX_EMULATED, NUM_INSTRUCTION_SETS, FIRST_WITH_TILES = AMX_EMULATED };
#define BY_SET(name) {name##_scalar, name##_scalar}
#endif

enum { INSTRUCTION_SET_BEST = -1 };

/* The fastest set of this machine. */
EXPORT int native_best_instruction_set(void);

/* Why this process multiplies no matrix tiles; empty when it does. The first call asks the operating system for leave. */
EXPORT const char *native_tiles_refusal(void);

/* The index to use for a wanted set, or -1 when this machine does not have it. */
int resolve_instruction_set(int wanted);

/* Digest of the sources this library was compiled from. */
EXPORT const char *native_digest(void);

#endif
