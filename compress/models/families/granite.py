"""Granite 3 (arXiv:2407.13739): Llama with four factors, on embeddings, scores, updates and logits; and Granite 4, in
most layers of which Mamba-2 (arXiv:2405.21060) takes the place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.models.block_parts import Residual
from compress.models.config import (
    Config,
    attention,
    by_kind,
    decoder,
    flag,
    gated_mlp,
    mixture,
    num_layers,
    number,
    positive,
    rope,
    text,
)
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mamba_config import mamba2
from compress.models.mixers.mixer import Mixer
from compress.models.mlp import MLP, Mixture
from compress.models.registry import register
from compress.models.spec import ModelSpec
from compress.models.stacks import Stack


@register("granite")
def granite(config: Config) -> ModelSpec:
    return _granite(config, gated_mlp(config, bias=flag(config, "mlp_bias")))


@register("granitemoe")
def granitemoe(config: Config) -> ModelSpec:
    """Describes a mixture of Granite, whose experts are stored together."""
    return _granite(config, _mixture(config))


@register("granitemoehybrid")
def granitemoehybrid(config: Config) -> ModelSpec:
    """Describes a Granite 4: a shared MLP in every layer, and experts next to it unless there are none of them."""
    hidden, size = positive(config, "hidden_size"), positive(config, "shared_intermediate_size", 1024)
    shared = MLP(
        (Linear("shared_mlp.input_linear", 2 * size, hidden),),
        Linear("shared_mlp.output_linear", hidden, size, split="rows"),
        text(config, "hidden_act", "silu"),
        name="shared_mlp",
    )
    mlp = shared if config.get("num_local_experts") == 0 else _mixture(config, shared)
    rotated = config.get("position_embedding_type") == "rope"
    mamba, softmax = mamba2(config), _attention(config, rope=rope(config) if rotated else None)
    mixers = {"linear_attention": mamba, "mamba": mamba, "full_attention": softmax, "attention": softmax}
    kinds = config.get("layer_types", config.get("layers_block_type"))
    return _granite(config, mlp, by_kind(config, kinds, mixers))


def _mixture(config: Config, shared: MLP | None = None) -> Mixture:
    name, config = "block_sparse_moe", {"num_local_experts": 8, "num_experts_per_tok": 2, **config}
    stacks = (
        Stack(f"{name}.input_linear.weight", ("gate_proj.weight", "up_proj.weight")),
        Stack(f"{name}.output_linear.weight", ("down_proj.weight",)),
    )
    return mixture(config, name=name, scores="router.layer", stacks=stacks, shared=shared)


def _attention(config: Config, **options: Any) -> Attention:
    # transformers takes null as the usual scale, and what is missing as 1.
    scale = number(config, "attention_multiplier", 1.0) if config.get("attention_multiplier", 1.0) is not None else None
    return attention(config, bias=flag(config, "attention_bias"), scale=scale, **options)


def _granite(config: Config, mlp: MLP | Mixture, mixers: Sequence[Mixer] | None = None) -> ModelSpec:
    """Composes the decoder; without `mixers` all layers have the same attention."""
    mixers = [_attention(config)] * num_layers(config) if mixers is None else mixers
    spec = decoder(config, mixers, mlp, residual=Residual.scaled(number(config, "residual_multiplier", 1.0)))
    return replace(
        spec,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )
