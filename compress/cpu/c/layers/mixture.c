#include "layers/mixture.h"

#include <stdlib.h>

#include "common/thread_pool.h"
#include "layers/router.h"

enum { ROWS_PER_CHUNK = 4 };

/* One call: rows of x, and their `num_places` copies, one for each chosen expert, sorted by expert. */
typedef struct {
    const Mixture *weights;
    int64_t rows, num_places;
    const uint16_t *x, *routed;
    const int64_t *slots;          /* [rows], or NULL */
    int64_t *place_slots;          /* [num_places] */
    uint16_t *out;
    int64_t *chosen, *places;      /* [rows, num_chosen]; a place is a row of what is sorted */
    float *shares;                 /* [rows, num_chosen]: weights of the chosen experts */
    int64_t *starts;               /* [num_experts + 1]: first place of every expert */
    LinearJob *jobs;               /* [num_experts + 1]: the last one is of the shared expert */
    uint16_t *sorted;              /* [num_places, size], first of x, then of what experts give */
    uint16_t *gate_up, *gated;     /* [num_places, ...] */
    uint16_t *shared_gate_up, *shared_gated, *shared; /* [rows, ...] */
} MixtureCall;

typedef void (*RowTask)(const MixtureCall *call, int64_t row);

INLINE void for_rows(void *context, int64_t chunk, RowTask task) {
    const MixtureCall *call = context;
    const int64_t last = (chunk + 1) * ROWS_PER_CHUNK;
    for (int64_t row = chunk * ROWS_PER_CHUNK; row < last && row < call->rows; row++) task(call, row);
}

INLINE void route_one(const MixtureCall *call, int64_t row) {
    const Router *router = &call->weights->router;
    const int64_t at = row * router->num_chosen;
    route_row(router, call->routed + row * router->size, call->chosen + at, call->shares + at);
}

/* Copies what an expert reads to its place. */
INLINE void copy_one(const MixtureCall *call, int64_t row) {
    const int64_t size = call->weights->router.size, count = call->weights->router.num_chosen;
    const uint16_t *x = call->x + row * size;
    for (int64_t at = row * count; at < (row + 1) * count; at++) {
        if (call->slots) call->place_slots[call->places[at]] = call->slots[row];
        uint16_t *to = call->sorted + call->places[at] * size;
        if (!call->weights->weighs_inputs) {
            memcpy(to, x, (size_t)size * sizeof *to);
            continue;
        }
        const Lanes weight = lanes_round_bfloat16(lanes_of(call->shares[at]));
        for (int64_t i = 0; i < size; i += LANES) lanes_store_bfloat16(to + i, lanes_load_bfloat16(x + i) * weight);
    }
}

/* Weight of the shared expert, a bfloat16 number. */
INLINE float shared_weight(const MixtureCall *call, int64_t row) {
    const int64_t size = call->weights->router.size;
    const Router gate = {.num_experts = 1, .size = size, .type = BFLOAT16, .scores = call->weights->shared_gate};
    float score;
    score_all(&gate, call->x + row * size, &score);
    return lanes_round_bfloat16(lanes_sigmoid(lanes_of(score)))[0];
}

INLINE void combine_one(const MixtureCall *call, int64_t row) {
    const int64_t size = call->weights->router.size, count = call->weights->router.num_chosen;
    const float shared = call->weights->shared_gate ? shared_weight(call, row) : 1.0f;
    const bool is_weighed = call->weights->weighs_inputs;
    const int64_t first = call->weights->first_held, stop = first + call->weights->num_held;
    for (int64_t i = 0; i < size; i += LANES) {
        Lanes sum = {0};
        for (int64_t k = row * count; k < (row + 1) * count; k++) {
            if (call->chosen[k] < first || call->chosen[k] >= stop) continue;
            const Lanes found = lanes_load_bfloat16(call->sorted + call->places[k] * size + i);
            const Lanes weight = lanes_of(is_weighed ? 1.0f : call->shares[k]);
            sum = lanes_round_bfloat16(sum + lanes_round_bfloat16(found * weight));
        }
        if (call->weights->shared)
            sum += lanes_round_bfloat16(lanes_load_bfloat16(call->shared + row * size + i) * lanes_of(shared));
        lanes_store_bfloat16(call->out + row * size + i, sum);
    }
}

static void route_scalar(void *call, int64_t chunk) { for_rows(call, chunk, route_one); }
static void combine_scalar(void *call, int64_t chunk) { for_rows(call, chunk, combine_one); }
#if ON_X86
FOR_AVX2 static void route_avx2(void *call, int64_t chunk) { for_rows(call, chunk, route_one); }
FOR_AVX2 static void combine_avx2(void *call, int64_t chunk) { for_rows(call, chunk, combine_one); }
FOR_AVX512 static void route_avx512(void *call, int64_t chunk) { for_rows(call, chunk, route_one); }
FOR_AVX512 static void combine_avx512(void *call, int64_t chunk) { for_rows(call, chunk, combine_one); }
#endif
static const PoolTask ROUTE[NUM_INSTRUCTION_SETS] = BY_SET(route);
static const PoolTask COMBINE[NUM_INSTRUCTION_SETS] = BY_SET(combine);
static void copy(void *call, int64_t chunk) { for_rows(call, chunk, copy_one); }

static void run_rows(PoolTask task, const MixtureCall *call) {
    pool_run(task, (void *)call, (call->rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK);
}

/* Places by expert, and in an expert by row. */
static void sort_places(const MixtureCall *call) {
    const int64_t count = call->weights->router.num_experts;
    int64_t *starts = call->starts;
    memset(starts, 0, (size_t)(count + 1) * sizeof *starts);
    for (int64_t i = 0; i < call->num_places; i++) starts[call->chosen[i] + 1]++;
    for (int64_t e = 0; e < count; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < call->num_places; i++) call->places[i] = starts[call->chosen[i]]++;
    for (int64_t e = count; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* Adds the products of adapters to those of a job, whose slots begin at `slots`. */
static int adapt(const Product *product, const LinearJob *job, const int64_t *slots, int set) {
    return product->adapters ? adapters_add(product->adapters, slots, job->rows, job->x, job->y, set) : 0;
}

/* One of the products of all experts; x and y have a row for every place. */
static int multiply(const MixtureCall *call, bool down, const uint16_t *x, uint16_t *y, const uint16_t *shared_x,
                    uint16_t *shared_y, int set) {
    const Mixture *weights = call->weights;
    int64_t count = weights->num_held;
    for (int64_t i = 0; i < count; i++) {
        const int64_t e = weights->first_held + i;
        const Product *product = down ? &weights->experts[i].down : &weights->experts[i].gate_up;
        const LinearWeight *weight = product->weight;
        call->jobs[i] = (LinearJob){weight, product->activations, call->starts[e + 1] - call->starts[e],
                                    x + call->starts[e] * weight->in_features, y + call->starts[e] * weight->out_features};
    }
    if (weights->shared) {
        const Product *product = down ? &weights->shared->down : &weights->shared->gate_up;
        call->jobs[count++] = (LinearJob){product->weight, product->activations, call->rows, shared_x, shared_y};
    }
    int failed = linear_multiply_all(call->jobs, count, BFLOAT16, set);
    if (call->slots == NULL) return failed;
    for (int64_t i = 0; i < weights->num_held && !failed; i++) {
        const Expert *expert = &weights->experts[i];
        const int64_t *slots = call->place_slots + call->starts[weights->first_held + i];
        failed = adapt(down ? &expert->down : &expert->gate_up, &call->jobs[i], slots, set);
    }
    if (weights->shared && !failed)
        failed = adapt(down ? &weights->shared->down : &weights->shared->gate_up, &call->jobs[count - 1], call->slots, set);
    return failed;
}

static int64_t width(const Expert *expert) { return expert->down.weight->in_features; }

static int compute(const MixtureCall *call, int set) {
    const Mixture *weights = call->weights;
    const ActivateMultiply gating = {call->num_places, width(weights->experts), call->gate_up, call->gated,
                                     weights->activation};
    run_rows(ROUTE[set], call);
    sort_places(call);
    run_rows(copy, call);
    int failed = multiply(call, false, call->sorted, call->gate_up, call->x, call->shared_gate_up, set);
    failed = failed || activate_and_mul(&gating, set);
    if (weights->shared) {
        const ActivateMultiply shared = {call->rows, width(weights->shared), call->shared_gate_up, call->shared_gated,
                                         weights->activation};
        failed = failed || activate_and_mul(&shared, set);
    }
    failed = failed || multiply(call, true, call->gated, call->sorted, call->shared_gated, call->shared, set);
    if (!failed) run_rows(COMBINE[set], call);
    return failed ? -1 : 0;
}

/* Cuts a piece off; memory is counted when there is none yet. */
static void *cut(char **memory, size_t *bytes, int64_t count, size_t size) {
    const size_t piece = ((size_t)count * size + 63) / 64 * 64;
    void *found = *memory;
    if (found != NULL) *memory += piece;
    *bytes += piece;
    return found;
}

static size_t lay_out(MixtureCall *call, char *memory) {
    const Mixture *weights = call->weights;
    const int64_t inner = width(weights->experts), shared = weights->shared ? width(weights->shared) : 0;
    const int64_t size = weights->router.size, rows = weights->shared ? call->rows : 0;
    size_t bytes = 0;
    call->chosen = cut(&memory, &bytes, call->num_places, sizeof *call->chosen);
    call->places = cut(&memory, &bytes, call->num_places, sizeof *call->places);
    call->shares = cut(&memory, &bytes, call->num_places, sizeof *call->shares);
    call->starts = cut(&memory, &bytes, weights->router.num_experts + 1, sizeof *call->starts);
    call->jobs = cut(&memory, &bytes, weights->router.num_experts + 1, sizeof *call->jobs);
    call->place_slots = cut(&memory, &bytes, call->slots ? call->num_places : 0, sizeof *call->place_slots);
    call->sorted = cut(&memory, &bytes, call->num_places * size, 2);
    call->gate_up = cut(&memory, &bytes, call->num_places * 2 * inner, 2);
    call->gated = cut(&memory, &bytes, call->num_places * inner, 2);
    call->shared_gate_up = cut(&memory, &bytes, rows * 2 * shared, 2);
    call->shared_gated = cut(&memory, &bytes, rows * shared, 2);
    call->shared = cut(&memory, &bytes, rows * size, 2);
    return bytes;
}

int mixture_route(const Mixture *weights, int64_t rows, const uint16_t *x, int64_t *chosen, float *shares,
                  int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    const MixtureCall call = {.weights = weights, .rows = rows, .routed = x, .chosen = chosen, .shares = shares};
    if (set < 0) return -1;
    run_rows(ROUTE[set], &call);
    return 0;
}

int mixture(const Mixture *weights, int64_t rows, const uint16_t *x, const uint16_t *routed, const int64_t *slots,
            uint16_t *out, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    if (rows < 1) return 0;
    MixtureCall call = {.weights = weights, .rows = rows, .num_places = rows * weights->router.num_chosen, .x = x};
    call.routed = routed == NULL ? x : routed, call.slots = slots, call.out = out;
    char *memory = malloc(lay_out(&call, NULL));
    if (memory == NULL) return -1;
    lay_out(&call, memory);
    const int failed = compute(&call, set);
    free(memory);
    return failed;
}
