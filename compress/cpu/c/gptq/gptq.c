#include "gptq/gptq.h"

#include <string.h>

#include "common/dispatch.h"
#include "common/simd.h"
#include "common/thread_pool.h"

enum {
    STEPS = 4,               /* vectors side by side: their sums hide each other's latency */
    WIDTH = STEPS * LANES,   /* outputs that are worked on together */
    LONGEST = 64,            /* columns of a stretch; longer ones are the caller's to cut */
    LARGEST_PATTERN = 16,
};

typedef uint8_t CodeLanes __attribute__((vector_size(LANES)));

/* A stretch of columns of WIDTH outputs, out of the way of the others'. Outputs past the last are zeros. */
typedef struct {
    Lanes target[LONGEST][STEPS], error[LONGEST][STEPS];
    IntLanes kept[LONGEST][STEPS]; /* all bits or none */
    int64_t output, filled;
} Tile;

INLINE void load_tile(const ColumnStretch *s, Tile *tile) {
    memset(tile->target, 0, sizeof tile->target);
    memset(tile->error, 0, sizeof tile->error);
    memset(tile->kept, 0xff, sizeof tile->kept);
    for (int64_t i = 0; i < s->count; i++) {
        int64_t from = (s->first + i) * s->outputs + tile->output;
        memcpy(tile->target[i], s->targets + from, (size_t)tile->filled * sizeof(float));
        memcpy(tile->error[i], s->errors + from, (size_t)tile->filled * sizeof(float));
        if (s->kept && !s->pattern_of)
            for (int64_t o = 0; o < tile->filled; o++) tile->kept[i][o / LANES][o % LANES] = -(s->kept[from + o] != 0);
    }
}

INLINE void store_tile(const ColumnStretch *s, const Tile *tile) {
    for (int64_t i = 0; i < s->count; i++) {
        int64_t to = (s->first + i) * s->outputs + tile->output;
        if (!s->codes) memcpy(s->targets + to, tile->target[i], (size_t)tile->filled * sizeof(float));
        memcpy(s->errors + to, tile->error[i], (size_t)tile->filled * sizeof(float));
        if (s->kept && s->pattern_of)
            for (int64_t o = 0; o < tile->filled; o++) s->kept[to + o] = tile->kept[i][o / LANES][o % LANES] != 0;
    }
}

/* Factor of error j in column i, both counted within the stretch. */
INLINE float feedback_to(const ColumnStretch *s, int64_t j, int64_t i) {
    return s->feedback[(s->first + j) * s->feedback_row + (s->first + i) * s->feedback_column];
}

/* The target of column i, given the errors of `known` columns of the stretch. */
INLINE void with_feedback(const ColumnStretch *s, const Tile *tile, int64_t i, int64_t known, Lanes *sum) {
    for (int step = 0; step < STEPS; step++) sum[step] = tile->target[i][step];
    for (int64_t j = 0; j < known; j++) {
        Lanes weight = lanes_of(feedback_to(s, j, i));
        for (int step = 0; step < STEPS; step++) sum[step] += tile->error[j][step] * weight;
    }
}

/* SparseGPT's choice among `pattern_of` columns from `begin`: the highest scores, of equal ones the first.
 * A target counts on every column before it having its final value; these have none yet, so what they feed each other
 * is taken back first: change = (target - original) (I - among)^-1, column by column. */
INLINE void choose(const ColumnStretch *s, Tile *tile, int64_t begin) {
    Lanes change[LARGEST_PATTERN][STEPS], score[LARGEST_PATTERN][STEPS];
    const int64_t size = s->pattern_of;
    for (int64_t i = 0; i < size; i++) {
        Lanes target[STEPS];
        with_feedback(s, tile, begin + i, begin, target);
        for (int step = 0; step < STEPS; step++) {
            Lanes original = tile->error[begin + i][step];
            change[i][step] = target[step] - original;
            for (int64_t j = 0; j < i; j++)
                change[i][step] -= change[j][step] * lanes_of(feedback_to(s, begin + j, begin + i));
            Lanes root = (original + change[i][step]) * lanes_of(s->spread[s->first + begin + i]);
            score[i][step] = root * root;
        }
    }
    for (int64_t i = 0; i < size; i++)
        for (int step = 0; step < STEPS; step++) {
            IntLanes better = {0};
            for (int64_t j = 0; j < size; j++)
                better -= j < i ? ~lanes_below(score[j][step], score[i][step]) : lanes_below(score[i][step], score[j][step]);
            tile->kept[begin + i][step] = lanes_negative(better - (int32_t)s->pattern_kept);
        }
}

/* The nearest value on the grid; its code is written, the zero point for what is pruned. */
INLINE Lanes on_grid(const ColumnStretch *s, const Tile *tile, int64_t i, int step, Lanes target) {
    int64_t from = tile->output + step * LANES, left = tile->filled - step * LANES;
    if (left <= 0) return target;
    int64_t row = s->group[s->first + i] * s->outputs + from;
    Lanes scale = lanes_load_some(s->scale + row, left, 1.0f), zero = lanes_load_some(s->zero + row, left, 0.0f);
    Lanes code = lanes_round(lanes_clamp(target / scale, -65536.0f, 65536.0f)) + zero;
    code = lanes_clamp(code, 0.0f, s->max_code);
    code = lanes_select(tile->kept[i][step], code, zero);
    CodeLanes narrow = __builtin_convertvector(code, CodeLanes);
    memcpy(s->codes + (s->first + i) * s->outputs + from, &narrow, (size_t)(left < LANES ? left : LANES));
    return (code - zero) * scale;
}

INLINE void change_tile(const ColumnStretch *s, int64_t number) {
    Tile tile;
    tile.output = number * WIDTH;
    tile.filled = s->outputs - tile.output < WIDTH ? s->outputs - tile.output : WIDTH;
    load_tile(s, &tile);
    for (int64_t i = 0; i < s->count; i++) {
        if (s->pattern_of && i % s->pattern_of == 0) choose(s, &tile, i);
        Lanes target[STEPS];
        with_feedback(s, &tile, i, i, target);
        for (int step = 0; step < STEPS; step++) {
            Lanes value = s->codes ? on_grid(s, &tile, i, step, target[step])
                                   : lanes_select(tile.kept[i][step], target[step], (Lanes){0});
            tile.target[i][step] = value;
            tile.error[i][step] -= value;
        }
    }
    store_tile(s, &tile);
}

static void tile_scalar(void *stretch, int64_t number) { change_tile(stretch, number); }
#if ON_X86
FOR_AVX2 static void tile_avx2(void *stretch, int64_t number) { change_tile(stretch, number); }
FOR_AVX512 static void tile_avx512(void *stretch, int64_t number) { change_tile(stretch, number); }
#endif
static const PoolTask TILE[NUM_INSTRUCTION_SETS] = BY_SET(tile);

int columns_change(ColumnStretch *stretch, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0 || stretch->count > LONGEST || stretch->pattern_of > LARGEST_PATTERN) return -1;
    pool_run(TILE[set], stretch, (stretch->outputs + WIDTH - 1) / WIDTH);
    return 0;
}
