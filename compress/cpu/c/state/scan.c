enum { SCAN_WIDTH = 4 };
#include "state/scan.h"

static void scan_scalar(void *share, int64_t chunk) { scan_heads(share, chunk); }
#if ON_X86
void scan_avx2(void *share, int64_t chunk);
void scan_avx512(void *share, int64_t chunk);
#endif
static const PoolTask SCAN[NUM_INSTRUCTION_SETS] = BY_SET(scan);

void scan_rows(const StateStep *job, int set) {
    const StateLayer *layer = job->layer;
    run_units(SCAN[set], job, job->sequences * layer->heads, layer->key_dim * layer->value_dim);
}

int state_step(const StateStep *job, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    convolve_rows(job, set);
    scan_rows(job, set);
    gate_rows(job, set);
    return 0;
}
