/* Which instruction set a kernel runs with. Every kernel takes the wanted one as an argument (INSTRUCTION_SET_BEST in
 * production, a certain one in tests), turns it into an index with `resolve_instruction_set`, and looks its function up
 * in a table of NUM_INSTRUCTION_SETS entries, from the slowest to the fastest. Functions are compiled for their set by
 * attribute, so one library serves every machine of an architecture. */
#ifndef NATIVE_DISPATCH_H
#define NATIVE_DISPATCH_H

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

#if defined(__x86_64__)
#define ON_X86 1
#define ON_ARM 0
/* AVX2 with FMA and 16-bit floats; AVX-512 with byte dot products (Cascade Lake, Ice Lake); with bfloat16 dot products as
 * well (Zen 4, Sapphire Rapids and later). */
enum { SCALAR, AVX2, AVX512, AVX512_BF16, NUM_INSTRUCTION_SETS };
#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")))
#define FOR_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,f16c")))
/* The table of a function in plain C that was compiled as name_scalar, name_avx2 and name_avx512. */
#define BY_SET(name) {name##_scalar, name##_avx2, name##_avx512, name##_avx512}
#elif defined(__aarch64__)
#define ON_X86 0
#define ON_ARM 1
/* Every processor has NEON, which plain C is compiled for; byte dot products came with Neoverse N1 and Apple's A13. */
enum { SCALAR, NEON, NEON_DOTPROD, NUM_INSTRUCTION_SETS };
#if defined(__clang__)
#define FOR_NEON_DOTPROD __attribute__((target("dotprod")))
#else
#define FOR_NEON_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define BY_SET(name) {name##_scalar, name##_scalar, name##_scalar}
#else
#define ON_X86 0
#define ON_ARM 0
enum { SCALAR, NUM_INSTRUCTION_SETS };
#define BY_SET(name) {name##_scalar}
#endif

enum { INSTRUCTION_SET_BEST = -1 };

/* The fastest set of this machine. */
EXPORT int native_best_instruction_set(void);

/* The index to use for a wanted set, or -1 when this machine does not have it. */
int resolve_instruction_set(int wanted);

/* Digest of the sources this library was compiled from. */
EXPORT const char *native_digest(void);

#endif
