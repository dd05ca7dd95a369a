"""Granite 3 (arXiv:2407.13739): Llama with four factors, on embeddings, scores, updates and logits."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import Config, attention, decoder, flag, gated_mlp, num_layers, number
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("granite")
def granite(config: Config) -> ModelSpec:
    """Describes a Granite."""
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, output_bias=bias, scale=number(config, "attention_multiplier", 1.0))
    spec = decoder(
        config,
        [mixer] * num_layers(config),
        gated_mlp(config, bias=flag(config, "mlp_bias")),
        residual_scale=number(config, "residual_multiplier", 1.0),
    )
    return replace(
        spec,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )
