/* Emulated matrix tiles against what the instructions are specified to do: which rows and bytes they touch, the order and the
 * rounding of sums, bytes exactly. Built by test_sanitizers.py. */
#include <stdio.h>
#include <stdlib.h>

#define TARGET
#define EMULATED_TILES
#include "common/matrix_tiles.h"

static int failures;

static void expect(int holds, const char *what) {
    if (!holds) failures++, fprintf(stderr, "%s\n", what);
}

static uint16_t bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Sums in tile 0 [rows][columns], a row of activations in tile 1, weights in tile 2. */
static void configure(int rows, int columns, int bytes) {
    TileShapes shapes = {.palette = 1, .rows = {rows, rows, bytes / 4}, .row_bytes = {4 * columns, bytes, 4 * columns}};
    tile_configure(&shapes);
}

static void test_loads_and_stores(void) {
    uint8_t from[3][20], to[3][24];
    memset(from, 7, sizeof from), memset(to, 1, sizeof to);
    configure(3, 2, 12);
    tile_load(1, from, sizeof *from);
    tile_store(1, to, sizeof *to);
    expect(to[2][11] == 7 && to[2][12] == 1 && to[0][12] == 1, "a store writes rows of 12 bytes, and nothing between them");
    tile_zero(1);
    tile_store(1, to, sizeof *to);
    expect(to[0][0] == 0 && to[2][11] == 0 && to[1][12] == 1, "a tile of zeros");
    configure(3, 2, 12);
    tile_store(0, to, sizeof *to);
    expect(to[1][0] == 0, "tiles are zero when they are configured");
}

/* One row by one column; pairs of inputs. */
static float dot(const float *x, const float *weights, int inputs, float sum) {
    uint16_t a[32] = {0}, b[16][2] = {{0}};
    for (int k = 0; k < inputs; k++) a[k] = bfloat16(x[k]), b[k / 2][k % 2] = bfloat16(weights[k]);
    configure(1, 1, 2 * inputs);
    tile_load(0, &sum, 4);
    tile_load(1, a, sizeof a);
    tile_load(2, b, sizeof *b);
    tile_add_bfloat16(0, 1, 2);
    tile_store(0, &sum, 4);
    return sum;
}

static void test_order_of_sums(void) {
    const float ones[6] = {1, 1, 1, 1, 1, 1};
    /* Even inputs: (2^30 + 1) - 2^30 loses 1; odd ones: 1 + 1 + 1. One after the other, all of them would lose more. */
    const float far[6] = {0x1p30f, 1, 1, 1, -0x1p30f, 1};
    expect(dot(far, ones, 6, 0) == 3, "even and odd inputs are added up apart");
    expect(dot(ones, ones, 6, 0x1p24f) == 0x1p24f + 6, "products come to the sum together");
    expect(dot((float[]){0x1p24f, 0, 1, 0}, ones, 4, -0x1p24f) == 0, "products are rounded before they come to the sum");
    const float x[4] = {-0x1p24f, 0, 0x1.02p12f, 0}, y[4] = {1, 0, 0x1.02p12f, 0};
    expect(dot(x, y, 4, 0) == 0x1.0404p24f - 0x1p24f, "products are fused");
}

static void test_denormals(void) {
    const float one[2] = {1, 1}, tiny[2] = {0x1p-130f, 0x1p-130f};
    expect(dot(tiny, one, 2, 0) == 0 && dot(one, one, 2, 0x1p-130f) == 2, "denormal inputs and sums count as zero");
    expect(dot((float[]){0x1p-126f, -0x1.02p-126f}, one, 2, 0) == 0, "denormal results are zero");
    expect(dot((float[]){0x1p-100f, 0}, (float[]){0x1p-100f, 0}, 2, 0) == 0, "so are products");
}

static void test_bytes(void) {
    int8_t a[5][64];
    uint8_t b[16][64];
    int32_t sums[5][16], wrong = 0;
    for (int i = 0; i < 5 * 64; i++) a[i / 64][i % 64] = (int8_t)(i * 37 % 256 - 128);
    for (int i = 0; i < 16 * 64; i++) b[i / 64][i % 64] = (uint8_t)(i * 91);
    for (int i = 0; i < 5 * 16; i++) sums[i / 16][i % 16] = 1000 * i;
    configure(5, 16, 64);
    tile_load(0, sums, 64);
    tile_load(1, a, 64);
    tile_load(2, b, 64);
    tile_add_bytes(0, 1, 2);
    tile_store(0, sums, 64);
    for (int m = 0; m < 5; m++)
        for (int n = 0; n < 16; n++) {
            int32_t sum = 1000 * (m * 16 + n);
            for (int k = 0; k < 64; k++) sum += a[m][k] * b[k / 4][4 * n + k % 4];
            wrong += sum != sums[m][n];
        }
    expect(!wrong, "signed by unsigned bytes");
}

int main(void) {
    test_loads_and_stores();
    test_order_of_sums();
    test_denormals();
    test_bytes();
    tile_release();
    return failures != 0;
}
