/* Decoder layers one after the other: the products, the glue and the attention of the other headers, with nothing
 * between them. Their results are those of the functions called one by one. */
#ifndef NATIVE_LAYERS_H
#define NATIVE_LAYERS_H

#include "attention/attention.h"
#include "layers/mixture.h"

typedef struct {
    const uint16_t *attention_norm, *mlp_norm; /* [size] */
    const uint16_t *head_norm;                 /* [heads + kv_heads, head_dim], or NULL for none */
    Product qkv, output;                       /* qkv gives its parts side by side, as gate_up of an expert */
    Expert mlp;                                /* no weights where there is a mixture */
    const Mixture *mixture;                    /* in place of the MLP, or NULL */
    const KvPages *pages;
    int64_t window; /* as in PagedAttention */
} DecoderLayer;

typedef struct {
    int64_t rows;
    float eps;
    int32_t hadamard;          /* as in KvStep */
    uint16_t *hidden;          /* bfloat16 [rows, size]; what the last layer adds to it is left in `update` */
    uint16_t *update;          /* [rows, size], written only */
    const uint16_t *cos, *sin; /* [rows, head_dim], as in Rotate */
    const int64_t *slots;      /* [rows], as in KvStep */
    const int64_t *adapters;   /* [rows]: slots as in adapters_add, or NULL for a step without adapters */
    PagedAttention attention;  /* scale, spans and blocks; the rest is filled in */
} LayersStep;

/* 0, or less: an instruction set that this machine lacks, or no memory. */
EXPORT int decoder_layers(const DecoderLayer *layers, int64_t num_layers, LayersStep *step, int instruction_set);

#endif
