/* Sums of a run of products of floats, scaled and added to those of the runs before. These functions are not inlined: so sums in
 * flight keep all registers to themselves. */
#ifndef NATIVE_LINEAR_SCALES_H
#define NATIVE_LINEAR_SCALES_H

INLINE TARGET Floats load_scale(const LinearWeight *weight, int64_t index) {
    if (weight->scale_type == FLOAT32) return floats_load((const float *)weight->scales + index);
    const uint16_t *halves = (const uint16_t *)weight->scales + index;
    return weight->scale_type == FLOAT16 ? floats_of_float16(halves) : floats_of_bfloat16(halves);
}

/* sums += found: numbers have no scales. */
NOINLINE TARGET void add_numbers(const Strip *strip, Words (*found)[VECTORS]) {
    for (int r = 0; r < strip->rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            floats_store(to, floats_load(to) + (Floats)found[r][v]);
        }
}

/* sums += found * scale */
NOINLINE TARGET void add_symmetric(const LinearWeight *weight, const Strip *strip, Words (*found)[VECTORS]) {
    Floats scale[VECTORS];
    for (int v = 0; v < VECTORS; v++) scale[v] = load_scale(weight, strip->scale + v * PER_VECTOR);
    for (int r = 0; r < strip->rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            floats_store(to, floats_fma((Floats)found[r][v], scale[v], floats_load(to)));
        }
}

/* sums += (found - (zero - center) * sum of x) * scale */
NOINLINE TARGET void add_asymmetric(const LinearWeight *weight, const Prepared *input, const Strip *strip,
                                    Words (*found)[VECTORS]) {
    const Words center = words_all(1u << (weight->bits - 1));
    Floats scale[VECTORS], zero[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = load_scale(weight, strip->scale + v * PER_VECTOR);
        zero[v] = floats_of(center - words_of_bytes(weight->zeros + strip->scale + v * PER_VECTOR));
    }
    for (int r = 0; r < strip->rows; r++) {
        const Floats sum = floats_all(input->sums[(strip->row + r) * input->num_runs + strip->run]);
        for (int v = 0; v < VECTORS; v++) {
            float *to = strip->sums + r * TILE + v * PER_VECTOR;
            const Floats moved = floats_fma(zero[v], sum, (Floats)found[r][v]);
            floats_store(to, floats_fma(moved, scale[v], floats_load(to)));
        }
    }
}

INLINE TARGET void add_floats(const LinearWeight *weight, const Prepared *input, const Strip *strip,
                              Words (*found)[VECTORS]) {
    if (weight->bits == 16)
        add_numbers(strip, found);
    else if (weight->zeros == NULL)
        add_symmetric(weight, strip, found);
    else
        add_asymmetric(weight, input, strip, found);
}

#endif
