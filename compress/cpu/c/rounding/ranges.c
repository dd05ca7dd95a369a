#include "rounding/ranges.h"

#include "rounding/tasks.h"

enum { SEARCHED = 1 << 11, ENCODED = 1 << 16 }; /* numbers of a chunk, about */

static const PoolTask SEARCH[NUM_INSTRUCTION_SETS] = BY_SET(search_rows), ENCODE[NUM_INSTRUCTION_SETS] = BY_SET(encode_rows);

int ranges_search(const RangeSearch *search, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    run_rows(SEARCH[set], search, search->rows, search->columns, SEARCHED);
    return 0;
}

int groups_encode(const GroupEncoding *encoding, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    run_rows(ENCODE[set], encoding, encoding->rows, encoding->columns, ENCODED);
    return 0;
}
