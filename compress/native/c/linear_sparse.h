/* Products with codes of which two of every four are kept (width SPARSE of linear.h), over the vectors of linear_runs.h,
 * which comes before. A file that includes this also defines
 *     words_half(word, half)              the lower 16 bits, or the upper ones brought down
 *     floats_quad(address)                four floats, again and again
 *     floats_pick(quad, word, shift)      of each quad the one that the two bits at `shift` name
 *     floats_at_place(word, shift, place, x)  x where these two bits are `place`, 0 elsewhere
 * A sum takes its inputs in their order and leaves out only zeros, so it is that of a decoded run. */

INLINE TARGET void run_sparse(const LinearWeight *weight, const Prepared *input, const Strip *strip, int bits,
                              int rows) {
    (void)bits;
    const float *x = (const float *)input->x + strip->row * input->stride + strip->run * input->run;
    const Table table = table_load(input->floats);
    const uint32_t *words = strip->words;
    Floats partial[MOST_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) partial[r][v] = floats_zero();
    for (int64_t k = 0; k < input->run; k += 16) {
        const int half = k / 16 % 2;
        Words codes[VECTORS], places[VECTORS];
        load_words(words + half * TILE, codes);
        load_words(words + 2 * TILE, places);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) places[v] = words_half(places[v], half);
        words += half * 3 * TILE;
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const Floats weights = table_look_up(table, codes[v], 4 * j);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const Floats picked = floats_pick(floats_quad(x + r * input->stride + k + j / 2 * 4), places[v], 2 * j);
                    partial[r][v] = floats_fma(weights, picked, partial[r][v]);
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

INLINE TARGET void decode_sparse(const uint32_t *words, const Prepared *input, int64_t run, uint32_t *decoded,
                                 int bits) {
    (void)bits;
    const Table table = table_load(input->floats);
    for (int64_t k = 0; k < run; k += 32, words += 3 * TILE, decoded += 32 * TILE)
        for (int v = 0; v < TILE / PER_VECTOR; v++) {
            const Words places = words_load(words + 2 * TILE + v * PER_VECTOR);
            float *to = (float *)decoded + v * PER_VECTOR;
#pragma GCC unroll 8
            for (int quad = 0; quad < 8; quad++) {
                const Words codes = words_load(words + quad / 4 * TILE + v * PER_VECTOR);
                const Floats first = table_look_up(table, codes, quad % 4 * 8);
                const Floats second = table_look_up(table, codes, quad % 4 * 8 + 4);
#pragma GCC unroll 4
                for (int place = 0; place < 4; place++, to += TILE)
                    floats_store(to, floats_add(floats_at_place(places, quad * 4, place, first),
                                                floats_at_place(places, quad * 4 + 2, place, second)));
            }
        }
}
