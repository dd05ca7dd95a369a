#include "rounding/learned.h"

#include "rounding/tasks.h"

enum { NUMBERS = 1 << 14 }; /* of a chunk, about */

static const PoolTask VALUES[NUM_INSTRUCTION_SETS] = BY_SET(value_rows), STEP[NUM_INSTRUCTION_SETS] = BY_SET(step_rows);

static int run(const PoolTask *tasks, const LearnedRounding *weight, int instruction_set) {
    const int set = resolve_instruction_set(instruction_set);
    if (set < 0) return -1;
    run_rows(tasks[set], weight, weight->rows, weight->columns, NUMBERS);
    return 0;
}

int learned_values(const LearnedRounding *weight, int instruction_set) { return run(VALUES, weight, instruction_set); }

int learned_step(const LearnedRounding *weight, int instruction_set) { return run(STEP, weight, instruction_set); }
