/* Products of adapters for some rows, compiled for one instruction set. Files that include this begin with a pragma for its
 * target: what is only inlined into a function for a target is taken apart by GCC before. */
#ifndef NATIVE_ADAPTER_ROWS_H
#define NATIVE_ADAPTER_ROWS_H

#include "common/bf16.h"
#include "linear/adapters.h"

enum { BLOCK = 4 /* rows that are computed together */, COLUMNS = 1024 /* of y that are worth a chunk */ };

typedef struct {
    const Adapters *adapters;
    const int64_t *slots;
    int64_t rows, column_chunks;
    const uint16_t *x;
    uint16_t *y;
    float *reduced; /* [rows, most_rank] */
} Call;

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* Products of `count` rows of x with four rows of `down`. */
INLINE void reduce(const uint16_t *x, const uint16_t *down, int64_t size, float *out, int64_t stride, const int count) {
    Lanes sums[2][RANK_MULTIPLE] = {{{0}}};
    for (int64_t i = 0; i < size; i += LANES) {
        Lanes of_x[2];
        for (int row = 0; row < count; row++) of_x[row] = lanes_load_bfloat16(x + row * size + i);
        for (int k = 0; k < RANK_MULTIPLE; k++) {
            const Lanes factor = lanes_load_bfloat16(down + k * size + i);
            for (int row = 0; row < count; row++) sums[row][k] += of_x[row] * factor;
        }
    }
    for (int row = 0; row < count; row++)
        for (int k = 0; k < RANK_MULTIPLE; k++) out[row * stride + k] = sum_of_lanes(sums[row][k]);
}

/* Adds to sixteen columns of `count` rows of y. */
INLINE void expand(const float *reduced, int64_t stride, const uint16_t *up, int64_t size, int64_t rank, uint16_t *y,
                   const int count) {
    Lanes sums[BLOCK];
    for (int row = 0; row < count; row++) sums[row] = lanes_load_bfloat16(y + row * size);
    for (int64_t k = 0; k < rank; k++) {
        const Lanes factor = lanes_load_bfloat16(up + k * size);
        for (int row = 0; row < count; row++) sums[row] += lanes_of(reduced[row * stride + k]) * factor;
    }
    for (int row = 0; row < count; row++) lanes_store_bfloat16(y + row * size, sums[row]);
}

/* Number of rows from `row` on, before `last`, with the same adapter. */
INLINE int64_t alike(const Call *call, int64_t row, int64_t last) {
    int64_t count = 1;
    while (row + count < last && call->slots[row + count] == call->slots[row]) count++;
    return count;
}

INLINE void reduce_rows(void *context, int64_t chunk) {
    const Call *call = context;
    const Adapters *own = call->adapters;
    const int64_t size = own->in_features, last = at_most((chunk + 1) * BLOCK, call->rows);
    for (int64_t row = chunk * BLOCK, count; row < last; row += count) {
        count = at_most(alike(call, row, last), 2);
        if (call->slots[row] < 0) continue;
        const AdapterPart *parts = own->parts + own->starts[call->slots[row]];
        const AdapterPart *stop = own->parts + own->starts[call->slots[row] + 1];
        if (parts == stop) continue;
        const int64_t first = parts->first, rank = stop[-1].first + stop[-1].count - first;
        for (int64_t k = 0; k < rank; k += RANK_MULTIPLE) {
            float *out = call->reduced + row * own->most_rank + k;
            const uint16_t *x = call->x + row * size, *down = own->down + (first + k) * size;
            if (count == 2) reduce(x, down, size, out, own->most_rank, 2);
            else reduce(x, down, size, out, own->most_rank, 1);
        }
    }
}

/* Columns of y from `begin` to `end` of some rows with the same adapter. */
INLINE void expand_part(const Call *call, const AdapterPart *part, int64_t skipped, int64_t row, int64_t count,
                        int64_t begin, int64_t end) {
    const Adapters *own = call->adapters;
    const int64_t size = own->out_features, stride = own->most_rank;
    const int64_t from = begin > part->column ? begin : part->column;
    const float *reduced = call->reduced + row * stride + skipped;
    for (int64_t i = from; i < at_most(end, part->column + part->num_columns); i += LANES) {
        const uint16_t *up = own->up + part->first * size + i;
        uint16_t *y = call->y + row * size + i;
        if (count == BLOCK) {
            expand(reduced, stride, up, size, part->count, y, BLOCK);
            continue;
        }
        for (int64_t each = 0; each < count; each++)
            expand(reduced + each * stride, stride, up, size, part->count, y + each * size, 1);
    }
}

INLINE void expand_rows(void *context, int64_t chunk) {
    const Call *call = context;
    const Adapters *own = call->adapters;
    const int64_t begin = chunk % call->column_chunks * COLUMNS, end = at_most(begin + COLUMNS, own->out_features);
    const int64_t block = chunk / call->column_chunks, last = at_most((block + 1) * BLOCK, call->rows);
    for (int64_t row = block * BLOCK, count; row < last; row += count) {
        count = alike(call, row, last);
        if (call->slots[row] < 0) continue;
        const int64_t stop = own->starts[call->slots[row] + 1];
        for (int64_t at = own->starts[call->slots[row]], skipped = 0; at < stop; skipped += own->parts[at++].count)
            expand_part(call, &own->parts[at], skipped, row, count, begin, end);
    }
}

#endif
