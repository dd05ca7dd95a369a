/* Matrix tiles: eight registers of up to 16 rows of up to 64 bytes, which instructions multiply with each other (AMX). A file
 * that includes this defines TARGET; with EMULATED_TILES the instructions are functions in plain C, with the same results, and
 * what the processor refuses traps.
 *
 *     tile_configure(shapes)           shapes of the registers from now on; all are zero
 *     tile_release()                   no registers are in use any more
 *     tile_zero(t), tile_load(t, from, stride), tile_store(t, to, stride)    rows `stride` bytes apart
 *     tile_add_bfloat16(sum, a, b)     sum[m][n] += a[m][k] * b[k / 2][n][k % 2], float32 += bfloat16 pairs: products of even k
 *                                      are added up apart from those of odd k, each fused and from the first to the last, then
 *                                      even + odd, then that to the sum; denormals count as zero
 *     tile_add_bytes(sum, a, b)        sum[m][n] += a[m][k] * b[k / 4][n][k % 4], int32 += signed times unsigned bytes
 *
 * Numbers of registers are literals, for they are part of the instruction. Registers belong to a thread. */
#ifndef NATIVE_MATRIX_TILES_H
#define NATIVE_MATRIX_TILES_H

#include <stdint.h>
#include <string.h>

#include "common/dispatch.h"

enum { MATRIX_TILES = 8, MATRIX_ROWS = 16, MATRIX_ROW_BYTES = 64 };

typedef struct {
    uint8_t palette, start_row, reserved[14]; /* 1, 0, 0 */
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

_Static_assert(sizeof(TileShapes) == 64, "what ldtilecfg reads");

#ifdef EMULATED_TILES

#include <math.h>

typedef union {
    uint8_t bytes[MATRIX_ROW_BYTES];
    int8_t signed_bytes[MATRIX_ROW_BYTES];
    uint16_t bfloat16[MATRIX_ROW_BYTES / 2];
    int32_t words[MATRIX_ROW_BYTES / 4];
    float floats[MATRIX_ROW_BYTES / 4];
} TileRow;

/* The registers of a thread, as the processor has them. */
static _Thread_local struct {
    TileShapes shapes;
    TileRow tiles[MATRIX_TILES][MATRIX_ROWS];
} tile_state;

static inline int tile_rows(int t) { return tile_state.shapes.rows[t]; }
static inline int tile_row_bytes(int t) { return tile_state.shapes.row_bytes[t]; }
static inline void tile_check(int holds) {
    if (!holds) __builtin_trap();
}

static inline void tile_configure(const TileShapes *shapes) {
    tile_check(shapes->palette == 1 && shapes->start_row == 0);
    for (int t = 0; t < 16; t++) {
        const int rows = shapes->rows[t], bytes = shapes->row_bytes[t];
        tile_check(rows <= MATRIX_ROWS && bytes <= MATRIX_ROW_BYTES && !rows == !bytes && (t < MATRIX_TILES || !rows));
    }
    memset(&tile_state, 0, sizeof tile_state);
    tile_state.shapes = *shapes;
}

static inline void tile_release(void) { memset(&tile_state, 0, sizeof tile_state); }

static inline void tile_zero(int t) {
    tile_check(tile_rows(t));
    memset(tile_state.tiles[t], 0, sizeof tile_state.tiles[t]);
}

static inline void tile_load(int t, const void *from, int64_t stride) {
    tile_zero(t);
    for (int row = 0; row < tile_rows(t); row++)
        memcpy(&tile_state.tiles[t][row], (const char *)from + row * stride, (size_t)tile_row_bytes(t));
}

static inline void tile_store(int t, void *to, int64_t stride) {
    tile_check(tile_rows(t));
    for (int row = 0; row < tile_rows(t); row++)
        memcpy((char *)to + row * stride, &tile_state.tiles[t][row], (size_t)tile_row_bytes(t));
}

/* Four bytes of a row of `a` meet a row of `b`. */
static inline void tile_check_product(int sum, int a, int b) {
    tile_check(sum != a && sum != b && a != b && tile_row_bytes(a) % 4 == 0 && tile_row_bytes(sum) % 4 == 0);
    tile_check(tile_rows(sum) == tile_rows(a) && tile_row_bytes(sum) == tile_row_bytes(b));
    tile_check(tile_row_bytes(a) / 4 == tile_rows(b) && tile_rows(b));
}

static inline float tile_flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static inline float tile_float(uint16_t bfloat16) {
    const uint32_t bits = (uint32_t)bfloat16 << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return tile_flush(x);
}

static inline void tile_add_bfloat16(int sum, int a, int b) {
    tile_check_product(sum, a, b);
    for (int m = 0; m < tile_rows(sum); m++)
        for (int n = 0; n < tile_row_bytes(sum) / 4; n++) {
            float parts[2] = {0, 0}, *to = &tile_state.tiles[sum][m].floats[n];
            for (int k = 0; k < tile_row_bytes(a) / 2; k++) {
                const uint16_t x = tile_state.tiles[a][m].bfloat16[k], y = tile_state.tiles[b][k / 2].bfloat16[2 * n + k % 2];
                parts[k % 2] = tile_flush(fmaf(tile_float(x), tile_float(y), parts[k % 2]));
            }
            *to = tile_flush(tile_flush(*to) + tile_flush(parts[0] + parts[1]));
        }
}

static inline void tile_add_bytes(int sum, int a, int b) {
    tile_check_product(sum, a, b);
    for (int m = 0; m < tile_rows(sum); m++)
        for (int n = 0; n < tile_row_bytes(sum) / 4; n++) {
            uint32_t added = (uint32_t)tile_state.tiles[sum][m].words[n]; /* wraps around */
            for (int k = 0; k < tile_row_bytes(a); k++)
                added += (uint32_t)(tile_state.tiles[a][m].signed_bytes[k] * tile_state.tiles[b][k / 4].bytes[4 * n + k % 4]);
            tile_state.tiles[sum][m].words[n] = (int32_t)added;
        }
}

#else

/* In assembly: intrinsics of some compilers do not say that they read memory. */
#define tile_configure(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(*(shapes)) : "memory")
#define tile_release() __asm__ volatile("tilerelease" ::: "memory")
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define tile_load(t, from, stride)                                                                                    \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, to, stride)                                                                                     \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
#define tile_add_bfloat16(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define tile_add_bytes(sum, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)

#endif

#endif
