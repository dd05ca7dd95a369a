/* Runs the machine code for matrix tiles on a processor that has none: each of its instructions raises SIGILL, and the handler
 * does what it says with emulated tiles. Products must have the bits of the emulated instruction set. Where the processor has
 * tiles nothing is raised, and the processor is compared with the emulation. Prints how many instructions were raised. Built by
 * test_matrix_tiles.py. */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#define TARGET
#define EMULATED_TILES
#include "common/matrix_tiles.h"
#include "common/bf16.h"
#include "common/thread_pool.h"
#include "linear/linear.h"

/* In place of dispatch.c: whatever is wanted is there. */
int native_best_instruction_set(void) { return AMX; }
int resolve_instruction_set(int wanted) { return wanted; }
const char *native_tiles_refusal(void) { return ""; }

static const int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* An instruction behind its prefix: C4, then bits R, X and B (inverted) with the map, then W, a register (inverted), L and pp. */
typedef struct {
    int prefix, opcode, target, source, other; /* pp, and three registers */
    char *address;
    int64_t stride;
    const uint8_t *end;
} Instruction;

static int64_t read_register(const ucontext_t *context, int number) {
    return context->uc_mcontext.gregs[REGISTERS[number]];
}

static int64_t read_displacement(const uint8_t **at, int mode) {
    int32_t wide;
    if (mode == 1) return (int8_t) * (*at)++;
    if (mode != 2) return 0;
    memcpy(&wide, *at, sizeof wide);
    *at += sizeof wide;
    return wide;
}

/* An operand in memory, by a base and perhaps an index; the index is the stride of loads and stores. */
static void read_address(Instruction *read, const ucontext_t *context, const uint8_t *at, int mode, int base, int extension) {
    int index = 4, scale = 0;
    if (base == 4) {
        scale = *at >> 6;
        index = (*at >> 3 & 7) | (extension & 0x40 ? 0 : 8);
        base = *at++ & 7;
    }
    if (base == 5 && mode == 0) abort(); /* no base */
    read->address = (char *)read_register(context, base | (extension & 0x20 ? 0 : 8));
    read->address += read_displacement(&at, mode);
    read->stride = index == 4 ? 0 : read_register(context, index) << scale;
    read->end = at;
}

static Instruction read_instruction(const ucontext_t *context) {
    const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) abort(); /* an instruction that is not one of tiles */
    const int mode = at[4] >> 6, operand = at[4] & 7;
    Instruction read = {.prefix = at[2] & 3, .opcode = at[3], .target = at[4] >> 3 & 7, .source = operand, .end = at + 5};
    read.other = ~at[2] >> 3 & 15;
    if (mode != 3) read_address(&read, context, at + 5, mode, operand, at[1]);
    return read;
}

enum { NONE, X66, XF3, XF2 };

static void execute(const Instruction *now) {
    switch (now->opcode << 4 | now->prefix) {
        case 0x49 << 4 | NONE: now->address ? tile_configure((const TileShapes *)now->address) : tile_release(); break;
        case 0x49 << 4 | XF2: tile_zero(now->target); break;
        case 0x4b << 4 | XF2: tile_load(now->target, now->address, now->stride); break;
        case 0x4b << 4 | XF3: tile_store(now->target, now->address, now->stride); break;
        case 0x5c << 4 | XF3: tile_add_bfloat16(now->target, now->source, now->other); break;
        case 0x5e << 4 | XF3: tile_add_bytes(now->target, now->source, now->other); break;
        default: abort();
    }
}

static _Atomic int raised;

static void on_illegal_instruction(int number, siginfo_t *information, void *context) {
    (void)number, (void)information;
    const Instruction now = read_instruction(context);
    execute(&now);
    raised++;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] = (greg_t)now.end;
}

enum { MOST_INPUTS = 1152, MOST_OUTPUTS = 70, MOST_ROWS = 130 };

static uint32_t draw(void) {
    static uint32_t state = 1;
    return (state = state * 1664525u + 1013904223u) >> 8;
}

static uint32_t words[(MOST_OUTPUTS + TILE) * MOST_INPUTS / 2];
static uint8_t codes[MOST_OUTPUTS * MOST_INPUTS], zeros[(MOST_OUTPUTS + TILE) * MOST_INPUTS];
static uint16_t numbers[MOST_OUTPUTS * MOST_INPUTS], x[MOST_ROWS * MOST_INPUTS];
static uint16_t found[MOST_ROWS * MOST_OUTPUTS], expected[MOST_ROWS * MOST_OUTPUTS];
static float scales[(MOST_OUTPUTS + TILE) * MOST_INPUTS];

static int differs(int bits, bool is_e4m3, int activations, int64_t rows, int64_t group, int64_t groups) {
    const bool has_zeros = bits != 16 && group % 64 == 0 && !is_e4m3;
    LinearWeight weight = {.out_features = MOST_OUTPUTS, .in_features = group * groups, .group = group, .bits = bits,
                           .is_e4m3 = is_e4m3, .fewest_tile_rows = 4, .words = words, .scales = scales,
                           .zeros = has_zeros ? zeros : NULL};
    if (bits == 16)
        linear_pack_bfloat16(numbers, MOST_OUTPUTS, group * groups, words), weight.group = group * groups;
    else
        linear_pack(codes, MOST_OUTPUTS, group * groups, bits, words);
    for (int i = 0; i < 16; i++) weight.table[i] = (float)(i - (1 << bits) / 2);
    const int64_t inputs = weight.in_features;
    const int failed = linear_multiply(&weight, activations, BFLOAT16, rows, x, inputs, found, MOST_OUTPUTS, AMX) ||
                       linear_multiply(&weight, activations, BFLOAT16, rows, x, inputs, expected, MOST_OUTPUTS, AMX_EMULATED);
    const int wrong = failed || memcmp(found, expected, sizeof *found * (size_t)(rows * MOST_OUTPUTS));
    if (wrong) fprintf(stderr, "%d bits, activations %d, %d rows, groups of %d\n", bits, activations, (int)rows, (int)group);
    return wrong;
}

static int run_cases(int bits, bool is_e4m3) {
    static const int64_t ROWS[] = {1, 3, 4, 16, 17, 40, MOST_ROWS}, GROUPS[] = {32, 128, 288, MOST_INPUTS};
    const uint32_t largest = (1u << (bits == 16 ? 8 : bits)) - 1;
    int wrong = 0;
    for (int i = 0; i < MOST_OUTPUTS * MOST_INPUTS; i++) codes[i] = (uint8_t)(draw() & largest);
    for (int activations = 0; activations <= (bits == 16 || is_e4m3 ? 0 : ACTIVATIONS_INT8_ROW); activations++)
        for (int i = 0; i < 7 * 4; i++)
            wrong |= differs(bits, is_e4m3, activations, ROWS[i % 7], GROUPS[i / 7], MOST_INPUTS / GROUPS[i / 7]);
    return wrong;
}

static float draw_number(void) { return (float)(draw() % 2001) / 1000 - 1; }

int main(void) {
    struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, NULL);
    pool_set_threads(2);
    for (int i = 0; i < MOST_OUTPUTS * MOST_INPUTS; i++) {
        numbers[i] = bfloat16_of(draw_number());
        scales[i] = draw_number();
        zeros[i] = (uint8_t)(draw() % 4);
    }
    for (int i = 0; i < MOST_ROWS * MOST_INPUTS; i++) x[i] = bfloat16_of(draw_number());
    const int wrong = run_cases(2, false) | run_cases(4, false) | run_cases(8, false) | run_cases(8, true) | run_cases(16, false);
    printf("%d\n", raised);
    return wrong;
}
