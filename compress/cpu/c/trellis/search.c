#include <stdlib.h>

#include "common/thread_pool.h"
#include "trellis/search_parts.h"

static const PoolTask SEARCH_TILES[NUM_INSTRUCTION_SETS] = BY_SET(search_tiles);

int trellis_search(const TrellisSearch *search, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    const int64_t threads = pool_threads(), chunks = search->tiles < threads ? search->tiles : threads;
    const size_t costs = 2 * TRELLIS_STATES * sizeof(float), origins = (size_t)TRELLIS_CODES * search_groups(search, 0);
    SearchBuffers buffers[POOL_MAX_THREADS];
    char *memory = malloc((size_t)chunks * (costs + origins) + 1);
    if (memory == NULL) return -2;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        char *from = memory + (size_t)chunk * (costs + origins);
        buffers[chunk] = (SearchBuffers){(float *)from, (uint8_t *)(from + costs)};
    }
    SearchCall call = {search, buffers, chunks};
    pool_run(SEARCH_TILES[set], &call, chunks);
    free(memory);
    return 0;
}
