#include "linear/tiles.h"
#include "common/thread_pool.h"

enum { ZERO_CODE = 8 }; /* of what is not kept */

typedef struct {
    const uint8_t *codes;
    const uint16_t *numbers; /* in place of codes */
    int64_t out_features, in_features;
    int bits;
    uint32_t *words;
} Packing;

static uint32_t code_at(const Packing *packing, int64_t row, int64_t input) {
    if (row >= packing->out_features) return 0;
    const int64_t at = row * packing->in_features + input;
    return packing->codes != NULL ? packing->codes[at] : packing->numbers[at];
}

INLINE void pack_features(const Packing *packing, int64_t tile, const int bits) {
    const int per_word = 32 / bits;
    const int64_t steps = packing->in_features / per_word;
    uint32_t *words = packing->words + tile * steps * TILE;
    for (int64_t feature = 0; feature < TILE; feature++)
        for (int64_t step = 0; step < steps; step++) {
            uint32_t word = 0;
#pragma GCC unroll 16
            for (int k = 0; k < per_word; k++)
                word |= code_at(packing, tile * TILE + feature, step * per_word + k) << code_shift(k, bits);
            words[step * TILE + feature] = word;
        }
}

/* Two codes of every four neighbours, those that are not zero among them, with their places. */
static void pack_kept(const Packing *packing, int64_t row, int64_t first, uint32_t *codes, uint32_t *places) {
    int spare = 2, found = 0;
    for (int place = 0; place < 4; place++) spare -= code_at(packing, row, first + place) != ZERO_CODE;
    for (int place = 0; place < 4 && found < 2; place++) {
        const uint32_t code = code_at(packing, row, first + place);
        if (code == ZERO_CODE && spare-- <= 0) continue;
        *codes |= code << 4 * found;
        *places |= (uint32_t)place << 2 * found++;
    }
}

static void pack_sparse(const Packing *packing, int64_t tile) {
    uint32_t *words = packing->words + tile * packing->in_features * SPARSE / 32 * TILE;
    for (int64_t input = 0; input < packing->in_features; input += 32, words += 3 * TILE)
        for (int64_t feature = 0; feature < TILE; feature++) {
            uint32_t all[3] = {0};
            for (int quad = 0; quad < 8; quad++) {
                uint32_t codes = 0, places = 0;
                pack_kept(packing, tile * TILE + feature, input + 4 * quad, &codes, &places);
                all[quad / 4] |= codes << quad % 4 * 8;
                all[2] |= places << quad * 4;
            }
            for (int i = 0; i < 3; i++) words[i * TILE + feature] = all[i];
        }
}

/* The width is a constant in each of them. */
static void pack_tile(void *context, int64_t tile) {
    const Packing *packing = context;
    switch (packing->bits) {
        case SPARSE: pack_sparse(packing, tile); break;
        case 2: pack_features(packing, tile, 2); break;
        case 4: pack_features(packing, tile, 4); break;
        case 8: pack_features(packing, tile, 8); break;
        default: pack_features(packing, tile, 16);
    }
}

static void pack(Packing packing) { pool_run(pack_tile, &packing, (packing.out_features + TILE - 1) / TILE); }

void linear_pack(const uint8_t *codes, int64_t out_features, int64_t in_features, int bits, uint32_t *words) {
    pack((Packing){codes, NULL, out_features, in_features, bits, words});
}

void linear_pack_bfloat16(const uint16_t *numbers, int64_t out_features, int64_t in_features, uint32_t *words) {
    pack((Packing){NULL, numbers, out_features, in_features, 16, words});
}
