/* Between linear.c, which goes through a weight, and the instruction sets, which multiply one run: some rows of
 * activations by the inputs of one tile that share their scales. Each set has a function for every kind of activations and
 * width of codes (kernel.inc); linear.c has the table of sets and kinds. */
#ifndef NATIVE_LINEAR_TILES_H
#define NATIVE_LINEAR_TILES_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "linear/linear.h"
#include "common/bf16.h"

enum { NUM_WIDTHS = 7, E4M3_INDEX = 6 };
/* Rows that share one pass over the weights and one decoded run: their sums stay in the second cache. */
enum { ROWS_PER_CHUNK = 128 };
enum { FEW_ROWS = 3 /* that vectors multiply in the order of matrix tiles */ };

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

/* Values of codes of 2 or 4 bits, repeated where they are fewer. */
typedef union {
    float floats[16];
    uint16_t bfloat16[32]; /* for kernels that take inputs in pairs */
} CodeTable;

/* Prepared activations, and what looks codes up. */
typedef struct {
    const void *x;  /* bfloat16 or float32 in their order, or 8-bit activations in the order of `q8_input` */
    int64_t stride; /* elements from row to row */
    int64_t run;    /* inputs per run */
    int64_t num_runs, num_groups, runs_per_group;
    int64_t num_blocks, runs_per_block; /* that share a scale: groups where there are no steps */
    const float *sums;         /* [rows][num_runs] of float activations; NULL when no zeros or minima ask for them */
    const int32_t *q8_sums; /* [rows][num_runs] of 8-bit activations */
    const float *q8_scales; /* likewise */
    CodeTable table;
    const float *values; /* [256], of bytes that are places in a table; or NULL */
} Prepared;

/* Which run of which rows, and where its sums are added. */
typedef struct {
    int64_t tile, run, row;
    int rows;              /* at most KernelKind.most_rows */
    const uint32_t *words; /* of the run: as stored, or decoded */
    float *sums;           /* [rows][TILE] */
} Place;

/* Some vectors of a tile's features, for some rows. */
typedef struct {
    int64_t run, row;
    int64_t scale, group; /* index of the first one's scale and minimum; of its zero and steps */
    int rows;
    const uint32_t *words;
    float *sums;
} Strip;

typedef void (*RunKernel)(const LinearWeight *weight, const Prepared *input, const Place *place);
/* Decodes a run: to pairs of bfloat16 (width 16) or to float32 (width 32), in the order of inputs. */
typedef void (*DecodeKernel)(const uint32_t *words, const Prepared *input, uint32_t *decoded);

/* By width (`width_index`, `kernel_index`). */
typedef struct {
    int most_rows;        /* in one block */
    int undecoded_blocks; /* that decode a run each for itself: more of them share a decoded copy */
    int decoded_bits;
    RunKernel run[NUM_WIDTHS];
    DecodeKernel decode[NUM_WIDTHS]; /* NULL where nothing is gained */
    void (*enter)(const Prepared *input, int64_t rows); /* before a chunk of `rows` rows; or NULL */
    void (*leave)(void);                                /* after it */
} KernelKind;

extern const KernelKind scalar_float32, scalar_q8, avx2_float32, avx2_q8;
extern const KernelKind avx512_float32, avx512_q8, avx512_bfloat16;
extern const KernelKind avx512_tile_order, amx_bfloat16, amx_q8, emulated_bfloat16, emulated_q8;
extern const KernelKind neon_float32, neon_q8, neon_dotprod_q8, neon_i8mm_q8;

/* Widths are 2, 4, 8, 16 and 32 bits, SPARSE, and 8 bits of e4m3 floats. */
INLINE int width_index(int bits) {
    return bits == 2 ? 0 : bits == 4 ? 1 : bits == 8 ? 2 : bits == 16 ? 3 : bits == 32 ? 4 : 5;
}
INLINE int kernel_index(const LinearWeight *weight) { return weight->is_e4m3 ? E4M3_INDEX : width_index(weight->bits); }

INLINE Strip strip_at(const LinearWeight *weight, const Prepared *input, const Place *place, int first) {
    Strip strip = {.run = place->run, .row = place->row, .rows = place->rows};
    strip.words = place->words + first, strip.sums = place->sums + first;
    if (weight->bits == 16) return strip;
    strip.scale = place->tile * input->num_blocks + place->run / input->runs_per_block;
    if (!weight->shares_scales) strip.scale = strip.scale * TILE + first;
    strip.group = (place->tile * input->num_groups + place->run / input->runs_per_group) * TILE + first;
    return strip;
}

/* Bit at which the code of input k of a word (0 <= k < 32 / bits) begins. */
INLINE int code_shift(int k, int bits) { return k / 2 * bits + k % 2 * 16; }

/* Byte i of a word of 8-bit activations meets byte i % 4 of (word >> bits * (i / 4)), masked: which input that is. */
INLINE int q8_input(int i, int bits) {
    const int shift = i % 4 * 8 + i / 4 * bits;
    return shift % 16 / bits * 2 + shift / 16;
}

INLINE int32_t load_word(const void *address) {
    int32_t word;
    memcpy(&word, address, sizeof word);
    return word;
}

#endif
