#include "layers/layers.h"

#include <stdlib.h>

#include "layers/norm_rope_act.h"

/* Activations inside of a layer, each [rows, ...], in one piece of memory. */
typedef struct {
    uint16_t *normed, *heads, *attended, *gate_up, *gated;
} Scratch;

static int multiply(const Product *product, const LayersStep *step, const uint16_t *x, uint16_t *y, int set) {
    const LinearWeight *weight = product->weight;
    const int failed = linear_multiply(weight, (int)product->activations, BFLOAT16, step->rows, x, weight->in_features, y,
                                       weight->out_features, set);
    if (failed || step->adapters == NULL || product->adapters == NULL) return failed;
    return adapters_add(product->adapters, step->adapters, step->rows, x, y, set);
}

static int normalize(const LayersStep *step, int64_t size, const uint16_t *update, const uint16_t *weight,
                     uint16_t *out, int set) {
    const AddNorm job = {step->rows, size, step->hidden, update, weight, step->eps, out, NULL};
    return add_rms_norm(&job, set);
}

/* Queries, keys and values of the step, and what its tokens see: from `heads` to `attended`. */
static int attend(const DecoderLayer *layer, LayersStep *step, const Scratch *scratch, int set) {
    const KvPages *pages = layer->pages;
    const int64_t dim = pages->head_dim, heads = layer->output.weight->in_features / dim;
    const int64_t rotated = heads + pages->kv_heads, stride = (rotated + pages->kv_heads) * dim;
    const KvStep kept = {.pages = pages,
                         .rows = step->rows,
                         .heads = heads,
                         .slots = step->slots,
                         .query = scratch->heads,
                         .key = scratch->heads + heads * dim,
                         .value = scratch->heads + rotated * dim,
                         .query_row = stride,
                         .key_row = stride,
                         .value_row = stride,
                         .norm = layer->head_norm,
                         .eps = step->eps,
                         .cos = step->cos,
                         .sin = step->sin,
                         .hadamard = step->hadamard};
    if (kv_store(&kept, set)) return -1;
    PagedAttention *attention = &step->attention;
    attention->pages = pages, attention->heads = heads, attention->window = layer->window;
    attention->query = scratch->heads, attention->query_row = stride, attention->out = scratch->attended;
    return paged_attention(attention, set);
}

/* From `normed` to the update. */
static int run_mlp(const DecoderLayer *layer, LayersStep *step, const Scratch *scratch, int set) {
    if (layer->mixture != NULL)
        return mixture(layer->mixture, step->rows, scratch->normed, NULL, step->adapters, step->update, set);
    const int64_t inner = layer->mlp.down.weight->in_features;
    const ActivateMultiply gating = {step->rows, inner, scratch->gate_up, scratch->gated, {SILU, 0, 0}};
    int failed = multiply(&layer->mlp.gate_up, step, scratch->normed, scratch->gate_up, set);
    failed = failed || activate_and_mul(&gating, set);
    return failed || multiply(&layer->mlp.down, step, scratch->gated, step->update, set);
}

static int run_layer(const DecoderLayer *layer, LayersStep *step, const uint16_t *update, const Scratch *scratch,
                     int set) {
    const int64_t size = layer->qkv.weight->in_features;
    int failed = normalize(step, size, update, layer->attention_norm, scratch->normed, set);
    failed = failed || multiply(&layer->qkv, step, scratch->normed, scratch->heads, set);
    failed = failed || attend(layer, step, scratch, set);
    failed = failed || multiply(&layer->output, step, scratch->attended, step->update, set);
    failed = failed || normalize(step, size, step->update, layer->mlp_norm, scratch->normed, set);
    failed = failed || run_mlp(layer, step, scratch, set);
    return failed ? -1 : 0;
}

/* Layers are of the same sizes, except that those with a mixture have no MLP and MLPs may differ. */
static uint16_t *make_room(const DecoderLayer *layers, int64_t num_layers, int64_t rows, Scratch *scratch) {
    int64_t inner = 0;
    for (int64_t i = 0; i < num_layers; i++)
        if (layers[i].mixture == NULL && layers[i].mlp.down.weight->in_features > inner)
            inner = layers[i].mlp.down.weight->in_features;
    const int64_t sizes[] = {layers->qkv.weight->in_features, layers->qkv.weight->out_features,
                             layers->output.weight->in_features, 2 * inner, inner};
    uint16_t **parts[] = {&scratch->normed, &scratch->heads, &scratch->attended, &scratch->gate_up, &scratch->gated};
    int64_t width = 0;
    for (int i = 0; i < 5; i++) width += sizes[i];
    uint16_t *room = malloc((size_t)(rows * width) * sizeof *room), *next = room;
    for (int i = 0; room != NULL && i < 5; next += rows * sizes[i++]) *parts[i] = next;
    return room;
}

int decoder_layers(const DecoderLayer *layers, int64_t num_layers, LayersStep *step, int instruction_set) {
    Scratch scratch;
    uint16_t *room = num_layers < 1 || step->rows < 1 ? NULL : make_room(layers, num_layers, step->rows, &scratch);
    if (room == NULL) return -1;
    int failed = 0;
    for (int64_t i = 0; i < num_layers && !failed; i++)
        failed = run_layer(&layers[i], step, i ? step->update : NULL, &scratch, instruction_set);
    free(room);
    return failed;
}
