"""Granite 3 (arXiv:2407.13739): Llama with four factors, on embeddings, scores, updates and logits."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import Config, attention, decoder, flag, gated_mlp, mixture, num_layers, number
from compress.models.registry import register
from compress.models.spec import MLP, Mixture, ModelSpec
from compress.models.stacks import Stack


@register("granite")
def granite(config: Config) -> ModelSpec:
    """Describes a dense Granite."""
    return _granite(config, gated_mlp(config, bias=flag(config, "mlp_bias")))


@register("granitemoe")
def granitemoe(config: Config) -> ModelSpec:
    """Describes a mixture of Granite, whose experts are stored together."""
    name, config = "block_sparse_moe", {"num_local_experts": 8, "num_experts_per_tok": 2, **config}
    stacks = (
        Stack(f"{name}.input_linear.weight", ("gate_proj.weight", "up_proj.weight")),
        Stack(f"{name}.output_linear.weight", ("down_proj.weight",)),
    )
    return _granite(config, mixture(config, name=name, scores="router.layer", stacks=stacks))


def _granite(config: Config, mlp: MLP | Mixture) -> ModelSpec:
    bias = flag(config, "attention_bias")
    # transformers takes null as the usual scale, and what is missing as 1.
    scale = number(config, "attention_multiplier", 1.0) if config.get("attention_multiplier", 1.0) is not None else None
    mixer = attention(config, qkv_bias=bias, output_bias=bias, scale=scale)
    spec = decoder(config, [mixer] * num_layers(config), mlp, residual_scale=number(config, "residual_multiplier", 1.0))
    return replace(
        spec,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )
