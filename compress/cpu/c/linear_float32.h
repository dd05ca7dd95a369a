/* Products with float32 activations, one input at a time. */
#include "linear_runs.h"
#include "linear_scales.h"

INLINE TARGET Words float32_weights(Words word, int input, int bits, Table table) {
    if (bits == 32) return word;
    const int shift = code_shift(input, bits);
    if (bits == 16) return shift ? word & 0xffff0000u : word << 16;
    if (bits == 8) return (Words)floats_centred(word, shift);
    return (Words)table_look_up(table, word, shift);
}

INLINE TARGET Words float32_values(const void *x) { return (Words)floats_all(*(const float *)x); }

INLINE TARGET Words float32_add(Words sum, Words weights, Words values, int bits) {
    (void)bits;
    return (Words)floats_fma((Floats)weights, (Floats)values, (Floats)sum);
}

static const Product float32_product = {1, sizeof(float), float32_weights, float32_values, float32_add};

INLINE TARGET void multiply_float32(const Prepared *input, const Strip *strip, int bits, int rows,
                                    Words (*sums)[VECTORS]) {
    multiply_words(input, strip, float32_product, bits, rows, sums);
}

INLINE TARGET void run_float32(const LinearWeight *weight, const Prepared *input, const Place *place, int bits) {
    run_place(weight, input, place, multiply_float32, add_floats, bits);
}

INLINE TARGET void decode_float32(const uint32_t *words, const Prepared *input, uint32_t *decoded, int bits) {
    decode_words(words, input, float32_product, decoded, bits);
}
