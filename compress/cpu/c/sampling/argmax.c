/* The highest score. */
#include "sampling/sampling.h"

#include <math.h>

#include "common/simd.h"
#include "common/thread_pool.h"

INLINE void peak_of_row(void *context, int64_t row) {
    const PeakRows *job = context;
    const float *scores = job->scores + row * job->vocab;
    Lanes nothing = {0}, most = lanes_of(-INFINITY); /* NaN where a score is not finite */
    int64_t whole = job->vocab / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        const Lanes x = lanes_load(scores + i);
        nothing += x * lanes_of(0.0f);
        most = lanes_max(most, x);
    }
    float rest = sum_of_lanes(nothing), peak = most[0];
    for (int lane = 1; lane < LANES; lane++) peak = most[lane] > peak ? most[lane] : peak;
    for (int64_t i = whole; i < job->vocab; i++) {
        rest += scores[i] * 0.0f;
        peak = scores[i] > peak ? scores[i] : peak;
    }
    int64_t id = 0;
    while (id < job->vocab - 1 && scores[id] != peak) id++;
    job->highest[row] = id;
    job->finite[row] = rest == 0;
}

static void peaks_scalar(void *job, int64_t row) { peak_of_row(job, row); }
#if ON_X86
FOR_AVX2 static void peaks_avx2(void *job, int64_t row) { peak_of_row(job, row); }
FOR_AVX512 static void peaks_avx512(void *job, int64_t row) { peak_of_row(job, row); }
#endif
static const PoolTask PEAKS[NUM_INSTRUCTION_SETS] = BY_SET(peaks);

int argmax_rows(const PeakRows *job, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    pool_run(PEAKS[set], (void *)job, job->rows);
    return 0;
}
