/* One chunk of a product: some rows by some tiles. */
#include "linear_call.h"

/* One run of a tile for all rows of a chunk, in blocks of about the same size. */
static void multiply_run(const LinearCall *call, Place place, int64_t num_rows, uint32_t *decoded) {
    const KernelKind *kernels = call->kernels;
    const DecodeKernel decode = kernels->decode[width_index(call->weight->bits)];
    const int64_t blocks = (num_rows + kernels->most_rows - 1) / kernels->most_rows;
    const int64_t block = (num_rows + blocks - 1) / blocks;
    int width = width_index(call->weight->bits);
    if (decode != NULL && blocks > kernels->undecoded_blocks) {
        decode(place.words, &call->prepared, decoded);
        place.words = decoded;
        width = width_index(kernels->decoded_bits);
    }
    for (int64_t done = 0; done < num_rows; done += block, place.row += block, place.sums += block * TILE) {
        place.rows = (int)smaller(num_rows - done, block);
        kernels->run[width](call->weight, &call->prepared, &place);
    }
}

INLINE void finish_row(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    const int64_t first = tile * TILE, count = smaller(call->weight->out_features - first, TILE);
    const int64_t at = row * call->y_stride + first;
    const float *bias = call->weight->bias;
    if (bias != NULL)
        for (int64_t i = 0; i < count; i++) sums[i] += bias[first + i];
    if (call->type == FLOAT32)
        memcpy((float *)call->y + at, sums, (size_t)count * sizeof *sums);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)call->y)[at + i] = bfloat16_of(sums[i]);
}

static void finish_scalar(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    finish_row(call, row, tile, sums);
}
#if ON_X86
FOR_AVX2 static void finish_avx2(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    finish_row(call, row, tile, sums);
}
FOR_AVX512 static void finish_avx512(const LinearCall *call, int64_t row, int64_t tile, float *sums) {
    finish_row(call, row, tile, sums);
}
#endif
const FinishRow finish_by_set[NUM_INSTRUCTION_SETS] = BY_SET(finish);

static void multiply_tile(const LinearCall *call, int64_t tile, int64_t row, int64_t num_rows) {
    float sums[ROWS_PER_CHUNK * TILE];
    uint32_t decoded[LONGEST_RUN * TILE];
    const int64_t run_words = call->prepared.run * call->weight->bits / 32 * TILE;
    memset(sums, 0, (size_t)(num_rows * TILE) * sizeof *sums);
    Place place = {.tile = tile, .row = row, .sums = sums};
    place.words = call->weight->words + tile * call->prepared.num_runs * run_words;
    for (; place.run < call->prepared.num_runs; place.run++, place.words += run_words)
        multiply_run(call, place, num_rows, decoded);
    for (int64_t r = 0; r < num_rows; r++) call->finish(call, row + r, tile, sums + r * TILE);
}

void multiply_chunk(void *context, int64_t chunk) {
    const LinearCall *call = context;
    const int64_t chunks_of_tiles = (call->num_tiles + call->tiles_per_chunk - 1) / call->tiles_per_chunk;
    const int64_t row = chunk / chunks_of_tiles * call->rows_per_chunk;
    const int64_t first = chunk % chunks_of_tiles * call->tiles_per_chunk;
    const int64_t last = smaller(first + call->tiles_per_chunk, call->num_tiles);
    for (int64_t tile = first; tile < last; tile++)
        multiply_tile(call, tile, row, smaller(call->rows_per_chunk, call->rows - row));
}
