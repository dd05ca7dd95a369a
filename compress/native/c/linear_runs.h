/* The products of one run with one strip of a tile, a few vectors of features, written once over the vectors of an
 * instruction set. A file that includes this defines
 *     TARGET                     the attribute of its functions
 *     PER_VECTOR, VECTORS        features per vector, and vectors per strip
 *     Floats, Words, Table       vectors of float32 and of 32-bit words, the 16 entries of a table
 *     floats_zero, floats_all, floats_load, floats_store, floats_add, floats_mul, floats_fma (a * b + c)
 *     floats_of, floats_from_bits    of integers, and of the same bits
 *     words_all, words_load, words_sub, words_mul
 *     words_high_half(word, shift)   the half word at bit `shift` as the upper half, zeros below
 *     words_code(word, shift, bits)  codes from bit `shift` on, masked
 *     words_bytes(word, shift, bits) codes from bit `shift` of every byte on, masked
 *     words_dot(sum, codes, levels)  sum + products of 4 unsigned bytes with 4 signed ones of `levels` (a word)
 *     table_load, table_look_up(table, word, shift)  of codes from bit `shift` on, whatever is above them
 *     load_scale(weight, index), load_bytes(address)  PER_VECTOR scales as Floats, PER_VECTOR bytes as Words */

enum { AHEAD = 2048 };

INLINE TARGET void load_words(const uint32_t *words, Words word[VECTORS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        word[v] = words_load(words + v * PER_VECTOR);
        if (v * PER_VECTOR % 16 == 0) __builtin_prefetch((const char *)(words + v * PER_VECTOR) + AHEAD);
    }
}

/* The functions that add sums up are not inlined: so those in flight keep all registers to themselves. */

/* sums += partial: numbers have no scales. */
NOINLINE TARGET void add_numbers(const Strip *strip, const Floats (*partial)[VECTORS]) {
    for (int r = 0; r < strip->rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            floats_store(to, floats_add(floats_load(to), partial[r][v]));
        }
}

/* sums += partial * scale */
NOINLINE TARGET void add_symmetric(const LinearWeight *weight, const Strip *strip, const Floats (*partial)[VECTORS]) {
    Floats scale[VECTORS];
    for (int v = 0; v < VECTORS; v++) scale[v] = load_scale(weight, strip->scale + v * PER_VECTOR);
    for (int r = 0; r < strip->rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            floats_store(to, floats_fma(partial[r][v], scale[v], floats_load(to)));
        }
}

/* sums += (partial - (zero - center) * sum of x) * scale */
NOINLINE TARGET void add_asymmetric(const LinearWeight *weight, const Prepared *input, const Strip *strip,
                                    const Floats (*partial)[VECTORS]) {
    const Words center = words_all(1 << (weight->bits - 1));
    Floats scale[VECTORS], zero[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = load_scale(weight, strip->scale + v * PER_VECTOR);
        zero[v] = floats_of(words_sub(center, load_bytes(weight->zeros + strip->scale + v * PER_VECTOR)));
    }
    for (int r = 0; r < strip->rows; r++) {
        const Floats sum = floats_all(input->sums[(strip->row + r) * input->num_runs + strip->run]);
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            const Floats moved = floats_fma(zero[v], sum, partial[r][v]);
            floats_store(to, floats_fma(moved, scale[v], floats_load(to)));
        }
    }
}

INLINE TARGET void add_run(const LinearWeight *weight, const Prepared *input, const Strip *strip,
                           const Floats (*partial)[VECTORS]) {
    if (weight->bits == 16)
        add_numbers(strip, partial);
    else if (weight->zeros == NULL)
        add_symmetric(weight, strip, partial);
    else
        add_asymmetric(weight, input, strip, partial);
}

/* ---- float32 activations ---- */

/* Of input k of every word. */
INLINE TARGET Floats number(Words word, int k, int bits, Table table) {
    if (bits == 32) return floats_from_bits(word);
    const int shift = code_shift(k, bits);
    if (bits == 16) return floats_from_bits(words_high_half(word, shift));
    if (bits == 8) return floats_of(words_sub(words_code(word, shift, bits), words_all(128)));
    return table_look_up(table, word, shift);
}

INLINE TARGET void run_float32(const LinearWeight *weight, const Prepared *input, const Strip *strip, int bits,
                               int rows) {
    const float *x = (const float *)input->x + strip->row * input->stride + strip->run * input->run;
    const Table table = table_load(input->floats);
    const uint32_t *words = strip->words;
    Floats partial[MOST_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) partial[r][v] = floats_zero();
    for (int64_t k = 0; k < input->run; k += 32 / bits, words += TILE) {
        Words word[VECTORS];
        load_words(words, word);
#pragma GCC unroll 16
        for (int j = 0; j < 32 / bits; j++) {
            Floats weights[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) weights[v] = number(word[v], j, bits, table);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const Floats value = floats_all(x[r * input->stride + k + j]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) partial[r][v] = floats_fma(weights[v], value, partial[r][v]);
            }
        }
    }
    Floats found[MOST_ROWS][VECTORS]; /* in memory; the sums in flight stay in registers */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) found[r][v] = partial[r][v];
    add_run(weight, input, strip, (const Floats(*)[VECTORS])found);
}

INLINE TARGET void decode_float32(const uint32_t *words, const Prepared *input, int64_t run, uint32_t *decoded,
                                  int bits) {
    const Table table = table_load(input->floats);
    for (int64_t k = 0; k < run; k += 32 / bits, words += TILE, decoded += TILE * 32 / bits)
        for (int v = 0; v < TILE / PER_VECTOR; v++) {
            const Words word = words_load(words + v * PER_VECTOR);
#pragma GCC unroll 16
            for (int j = 0; j < 32 / bits; j++)
                floats_store((float *)decoded + j * TILE + v * PER_VECTOR, number(word, j, bits, table));
        }
}

/* ---- 8-bit activations ---- */

/* sums += (dot - zero * sum of levels) * scale * scale of levels; the difference is exact. */
NOINLINE TARGET void add_levels(const LinearWeight *weight, const Prepared *input, const Strip *strip,
                                const Words (*dot)[VECTORS]) {
    Floats scale[VECTORS];
    Words zero[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const int64_t index = strip->scale + v * PER_VECTOR;
        scale[v] = load_scale(weight, index);
        zero[v] = weight->zeros == NULL ? words_all(1 << (weight->bits - 1)) : load_bytes(weight->zeros + index);
    }
    for (int r = 0; r < strip->rows; r++) {
        const int64_t at = (strip->row + r) * input->num_runs + strip->run;
        const Words sum = words_all(input->level_sums[at]);
        const Floats level_scale = floats_all(input->level_scales[at]);
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            const Floats moved = floats_of(words_sub(dot[r][v], words_mul(zero[v], sum)));
            floats_store(to, floats_fma(moved, floats_mul(scale[v], level_scale), floats_load(to)));
        }
    }
}

INLINE TARGET void run_levels(const LinearWeight *weight, const Prepared *input, const Strip *strip, int bits,
                              int rows) {
    const int8_t *x = (const int8_t *)input->x + strip->row * input->stride + strip->run * input->run;
    const uint32_t *words = strip->words;
    Words dot[MOST_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) dot[r][v] = words_all(0);
    for (int64_t k = 0; k < input->run; k += 32 / bits, words += TILE) {
        Words word[VECTORS];
        load_words(words, word);
#pragma GCC unroll 4
        for (int j = 0; j < 8 / bits; j++) {
            Words codes[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) codes[v] = words_bytes(word[v], bits * j, bits);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const int32_t levels = load_word(x + r * input->stride + k + 4 * j);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) dot[r][v] = words_dot(dot[r][v], codes[v], levels);
            }
        }
    }
    Words found[MOST_ROWS][VECTORS]; /* in memory; the sums in flight stay in registers */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) found[r][v] = dot[r][v];
    add_levels(weight, input, strip, (const Words(*)[VECTORS])found);
}
