/* Search for trellis codes: of each tile the cyclic stream of 256 codes whose numbers have the least squared error, after QTIP
 * (https://arxiv.org/abs/2406.11235), algorithms 3 and 4.
 *
 * A state is the 16 bits that end with a code, so the states before step t are those of all `1 << width` highest parts above the
 * same lower bits, where the width of code t is half of `pair_bits`, rounded down for even t and up for odd t. A first pass over the
 * steps around the end of the stream, with any first state, finds the state after the last step; a second one over all steps begins
 * and ends with it.
 *
 * Costs are float32, (number - value)^2 plus the least cost before it, two roundings; of equal costs the lowest state is taken. No
 * instruction set and no number of threads changes any bit. */
#ifndef NATIVE_TRELLIS_SEARCH_H
#define NATIVE_TRELLIS_SEARCH_H

#include <stdint.h>

#include "common/dispatch.h"

enum { TRELLIS_CODES = 256, TRELLIS_STATES = 1 << 16, TRELLIS_OVERLAP = 64 };

typedef struct {
    int64_t tiles;
    int32_t pair_bits;     /* of two codes, 2 to 16 */
    const float *numbers;  /* [TRELLIS_STATES] */
    const float *values;   /* [tiles][TRELLIS_CODES], in the order of the stream */
    uint16_t *states;      /* [tiles][TRELLIS_CODES]: output */
} TrellisSearch;

/* Returns 0, -1 when this machine lacks the instruction set, or -2 when out of memory. */
EXPORT int trellis_search(const TrellisSearch *search, int instruction_set);

#endif
