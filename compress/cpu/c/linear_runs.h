/* The products of one run with a tile, in strips of VECTORS vectors of features, over the vectors of linear_vectors.h, which
 * come before. A file that includes this also defines VECTORS and MOST_ROWS: so many sums stay in registers while a strip is
 * multiplied. They are kept as words, whatever they are.
 *
 * A kind of activations is a function `multiply` that adds a strip's products up and one, `add`, that scales these sums; both
 * become part of the functions that RUN_KERNEL makes, in which the width of codes and the number of rows are constants. */
#ifndef NATIVE_LINEAR_RUNS_H
#define NATIVE_LINEAR_RUNS_H

enum { AHEAD = 2048 /* bytes */ };

typedef void (*Multiply)(const Prepared *input, const Strip *strip, int bits, int rows, Words (*sums)[VECTORS]);
typedef void (*Add)(const LinearWeight *weight, const Prepared *input, const Strip *strip, Words (*found)[VECTORS]);

INLINE TARGET void run_strip(const LinearWeight *weight, const Prepared *input, const Strip *strip, Multiply multiply,
                             Add add, int bits, int rows) {
    Words sums[MOST_ROWS][VECTORS], found[MOST_ROWS][VECTORS]; /* in registers, and where `add` sees them */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = words_all(0);
    multiply(input, strip, bits, rows, sums);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) found[r][v] = sums[r][v];
    add(weight, input, strip, found);
}

INLINE TARGET void run_strips(const LinearWeight *weight, const Prepared *input, const Place *place, Multiply multiply,
                              Add add, int bits, int rows) {
    for (int first = 0; first < TILE; first += VECTORS * PER_VECTOR) {
        const Strip strip = strip_at(weight, input, place, first);
        run_strip(weight, input, &strip, multiply, add, bits, rows);
    }
}

INLINE TARGET void run_place(const LinearWeight *weight, const Prepared *input, const Place *place, Multiply multiply,
                             Add add, int bits) {
    switch (place->rows) {
        case 1: run_strips(weight, input, place, multiply, add, bits, 1); break;
        case 2: if (MOST_ROWS >= 2) run_strips(weight, input, place, multiply, add, bits, 2); break;
        case 3: if (MOST_ROWS >= 3) run_strips(weight, input, place, multiply, add, bits, 3); break;
        case 4: if (MOST_ROWS >= 4) run_strips(weight, input, place, multiply, add, bits, 4); break;
        case 5: if (MOST_ROWS >= 5) run_strips(weight, input, place, multiply, add, bits, 5); break;
        case 6: if (MOST_ROWS >= 6) run_strips(weight, input, place, multiply, add, bits, 6); break;
    }
}

INLINE TARGET void load_words(const uint32_t *words, Words word[VECTORS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        word[v] = words_load(words + v * PER_VECTOR);
        if (v * PER_VECTOR % 16 == 0) __builtin_prefetch((const char *)(words + v * PER_VECTOR) + AHEAD);
    }
}

/* What a word is multiplied by, one vector of weights after the other. */
typedef struct {
    int inputs; /* neighbours that a vector of weights has of every feature */
    int size;   /* bytes of an activation */
    Words (*weights)(Words word, int step, int bits, Table table); /* from input step * inputs of the word on */
    Words (*values)(const void *x);                                /* of so many inputs, the same for all features */
    Words (*add)(Words sum, Words weights, Words values, int bits);
} Product;

INLINE TARGET void multiply_words(const Prepared *input, const Strip *strip, Product product, int bits, int rows,
                                  Words (*sums)[VECTORS]) {
    const char *x = (const char *)input->x + (strip->row * input->stride + strip->run * input->run) * product.size;
    const Table table = table_load(input->table.floats);
    const uint32_t *words = strip->words;
    for (int64_t k = 0; k < input->run; k += 32 / bits, words += TILE) {
        Words word[VECTORS];
        load_words(words, word);
#pragma GCC unroll 16
        for (int step = 0; step < 32 / bits / product.inputs; step++) {
            Words weights[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) weights[v] = product.weights(word[v], step, bits, table);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const Words values = product.values(x + (r * input->stride + k + step * product.inputs) * product.size);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[r][v] = product.add(sums[r][v], weights[v], values, bits);
            }
        }
    }
}

INLINE TARGET void decode_words(const uint32_t *words, const Prepared *input, Product product, uint32_t *decoded,
                                int bits) {
    const Table table = table_load(input->table.floats);
    const int steps = 32 / bits / product.inputs;
    for (int64_t k = 0; k < input->run; k += 32 / bits, words += TILE, decoded += steps * TILE)
        for (int v = 0; v < TILE / PER_VECTOR; v++) {
            const Words word = words_load(words + v * PER_VECTOR);
#pragma GCC unroll 16
            for (int step = 0; step < steps; step++)
                words_store(decoded + step * TILE + v * PER_VECTOR, product.weights(word, step, bits, table));
        }
}

#define RUN_KERNEL(kind, bits)                                                                                        \
    static TARGET void run_##kind##_##bits(const LinearWeight *weight, const Prepared *input, const Place *place) {   \
        run_##kind(weight, input, place, bits);                                                                       \
    }
#define DECODE_KERNEL(kind, bits)                                                                                     \
    static TARGET void decode_##kind##_##bits(const uint32_t *words, const Prepared *input, uint32_t *decoded) {      \
        decode_##kind(words, input, decoded, bits);                                                                   \
    }

#endif
