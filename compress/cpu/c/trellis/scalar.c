/* Plain C for every other processor. */
#define TARGET
enum { PER_VECTOR = 4, MOST_ROWS = 4 };
#include "trellis/kernel.h"
#include "trellis/search_parts.h"

/* Two roundings: a fused operation would be a call of a function here. */
INLINE Floats floats_fma(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Words byte_sums(Words words) {
    const Words pairs = (words & 0xff00ff) + (words >> 8 & 0xff00ff);
    return ((pairs + (pairs >> 16)) & 0xffff) + 1024;
}

#include "trellis/kernel.inc"
#include "trellis/search.inc"

void turn_row_scalar(void *call, int64_t row) { turn_inputs(call, row); }
void multiply_block_scalar(void *call, int64_t chunk) { multiply_block(call, chunk); }
void search_tiles_scalar(void *call, int64_t chunk) { search_tiles(call, chunk); }
