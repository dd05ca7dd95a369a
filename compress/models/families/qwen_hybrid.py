"""Hybrids of Qwen: Qwen3-Next and Qwen3.5, three layers of the gated delta rule (arXiv:2412.06464) to one of attention
with gated output, dense or mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.models.config import (
    Config,
    attention,
    by_kind,
    decoder,
    flag,
    gated_mlp,
    mixture,
    norm,
    num_layers,
    positive,
    refusal,
    rope,
    text,
)
from compress.models.families.qwen_moe import layers_of
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mlp import MLP, Mixture
from compress.models.mtp import with_mtp_module
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec
from compress.models.stacks import Stack

COMMON = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
FROM_ONE = {"offset": 1.0}
"""Norms whose stored weights count from 1."""


@register("qwen3_next")
def qwen3_next(config: Config) -> ModelSpec:
    """Describes a Qwen3-Next, whose projections are stored by key head."""
    config = {**COMMON, "num_experts": 512, "num_experts_per_tok": 10, **config}
    experts = _mixture(config, normalizes=flag(config, "norm_topk_prob", True))
    return _hybrid(config, layers_of(config, experts, num_layers(config)), grouped=True)


@register("qwen3_5_text")
def qwen3_5_text(config: Config) -> ModelSpec:
    config = {**COMMON, "num_key_value_heads": 4, **config}
    return _hybrid(config, gated_mlp(config))


@register("qwen3_5_moe_text")
def qwen3_5_moe_text(config: Config) -> ModelSpec:
    """Describes the text part of a mixture of Qwen3.5, whose experts are stored together."""
    config = {**COMMON, "num_experts": 256, "num_experts_per_tok": 8, **config}
    stacks = (
        Stack("mlp.experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), splits_packed=True),
        Stack("mlp.experts.down_proj", ("down_proj.weight",), splits_packed=True),
    )
    return _hybrid(config, _mixture(config, stacks=stacks))


# Positions of text are the same in all sections of a multimodal rotary embedding, which makes it a plain one.
WRAPPERS.register("qwen3_5")(Wrapper("qwen3_5_text"))
WRAPPERS.register("qwen3_5_moe")(Wrapper("qwen3_5_moe_text"))


def _mixture(config: Config, **options: Any) -> Mixture:
    size = positive(config, "shared_expert_intermediate_size")
    return mixture(
        config,
        size=positive(config, "moe_intermediate_size"),
        shared=gated_mlp(config, name="mlp.shared_expert", size=size),
        shared_gate=Linear("mlp.shared_expert_gate", 1, positive(config, "hidden_size")),
        **options,
    )


def _hybrid(config: Config, mlps: MLP | Mixture | Sequence[MLP | Mixture], *, grouped: bool = False) -> ModelSpec:
    """Composes the decoder; `grouped` as in `GatedDeltaNet`."""
    mixers: dict[str, Attention | GatedDeltaNet] = {
        "linear_attention": _delta_net(config, grouped),
        "full_attention": _attention(config),
    }
    period, kinds = positive(config, "full_attention_interval", 4), config.get("layer_types")
    if kinds is None:
        layers = range(1, num_layers(config) + 1)
        kinds = ["linear_attention" if layer % period else "full_attention" for layer in layers]
    spec = decoder(config, by_kind(config, kinds, mixers), mlps, style=FROM_ONE)
    return with_mtp_module(spec, replace(spec.blocks[-1], mixer=mixers["full_attention"]))


def _attention(config: Config) -> Attention:
    bias, rotary = flag(config, "attention_bias"), rope(config, knows_partial=True)
    return attention(config, bias=bias, qk_norm=FROM_ONE, output_gate=True, rope=rotary)


def _delta_net(config: Config, grouped: bool) -> GatedDeltaNet:
    """Composes a layer of the gated delta rule. Raises CheckpointError: value heads that do not divide among the key
    heads."""
    name, hidden = "linear_attn", positive(config, "hidden_size")
    key_heads, heads = positive(config, "linear_num_key_heads", 16), positive(config, "linear_num_value_heads", 32)
    key_dim, value_dim = positive(config, "linear_key_head_dim", 128), positive(config, "linear_value_head_dim", 128)
    if heads % key_heads:
        raise refusal("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads={key_heads}")
    keys, values = key_heads * key_dim, heads * value_dim
    qkv = {"in_proj_qkvz": 2 * (keys + values)} if grouped else {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
    gates = {"in_proj_ba": 2 * heads} if grouped else {"in_proj_b": heads, "in_proj_a": heads}
    inputs, strengths = (
        tuple(Linear(f"{name}.{part}", rows, hidden) for part, rows in parts.items()) for parts in (qkv, gates)
    )
    return GatedDeltaNet(
        heads,
        key_heads,
        key_dim,
        value_dim,
        inputs,
        strengths,
        Linear(f"{name}.out_proj", hidden, values, split="rows"),
        norm(config, f"{name}.norm", value_dim),
        positive(config, "linear_conv_kernel_dim", 4),
        grouped,
        text(config, "hidden_act", "silu"),
    )
