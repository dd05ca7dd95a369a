/* Between search.c and the instruction sets, which compile search.inc. */
#ifndef NATIVE_TRELLIS_SEARCH_PARTS_H
#define NATIVE_TRELLIS_SEARCH_PARTS_H

#include <math.h>

#include "trellis/search.h"

typedef struct {
    float *costs;     /* [2][TRELLIS_STATES] */
    uint8_t *origins; /* [TRELLIS_CODES][TRELLIS_STATES >> width], width of the narrower codes */
} SearchBuffers;

typedef struct {
    const TrellisSearch *search;
    SearchBuffers *buffers; /* of each chunk */
    int64_t chunks;
} SearchCall;

INLINE int code_width(const TrellisSearch *search, int step) { return (search->pair_bits + step % 2) / 2; }
/* Groups of states that have the same lower bits before a step; even steps have the most. */
INLINE int search_groups(const TrellisSearch *search, int step) { return TRELLIS_STATES >> code_width(search, step); }

/* Task of the pool: every `chunks`-th tile from `chunk` on. */
#define SEARCH_TASKS(set) void search_tiles_##set(void *call, int64_t chunk);
SEARCH_TASKS(scalar)
SEARCH_TASKS(avx2)
SEARCH_TASKS(avx512)

#endif
