"""LFM2 (arXiv:2511.23404): attention in some layers, a gated convolution over few tokens in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    mixture,
    norm,
    num_layers,
    number,
    positive,
    refusal,
    rope,
)
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.recurrent import Recurrent
from compress.models.mixers.short_conv import ShortConv
from compress.models.mlp import MLP, Mixture
from compress.models.registry import register
from compress.models.spec import ModelSpec

NAME, PARTS = "feed_forward", ("w1", "w3", "w2")


@register("lfm2")
def lfm2(config: Config) -> ModelSpec:
    """Describes a dense LFM2, whose `intermediate_size` may be rounded up from two thirds of it."""
    config = {**config, "intermediate_size": config.get("block_ff_dim", config.get("intermediate_size", 12288))}
    return _lfm2(config, gated_mlp(config, name=NAME, size=_inner_size(config), parts=PARTS))


@register("lfm2_moe")
def lfm2_moe(config: Config) -> ModelSpec:
    """Describes a mixture of LFM2, whose first layers have an MLP."""
    config = {
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        **config,
    }
    experts = mixture(
        config,
        name=NAME,
        size=positive(config, "moe_intermediate_size"),
        parts=PARTS,
        activation="sigmoid",
        bias=f"{NAME}.expert_bias" if flag(config, "use_expert_bias", True) else "",
        normalizes=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
        added_sum=1e-6,
    )
    mlp, dense = gated_mlp(config, name=NAME, parts=PARTS), number(config, "num_dense_layers", 2)
    return _lfm2(config, [mlp if layer < dense else experts for layer in range(num_layers(config))])


def _inner_size(config: Config) -> int:
    size = positive(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    size, multiple = (
        int(number(config, "block_ffn_dim_multiplier", 1.0) * size),
        positive(config, "block_multiple_of", 256),
    )
    return multiple * -(-size // multiple)


def _lfm2(config: Config, mlps: MLP | Mixture | Sequence[MLP | Mixture]) -> ModelSpec:
    config = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        **config,
        "tie_word_embeddings": config.get("tie_embedding", config.get("tie_word_embeddings", True)),
        "hidden_act": "silu",
    }
    mixers: dict[str, Recurrent | Attention] = {"conv": _conv(config), "full_attention": _attention(config)}
    norms: dict[str, Any] = {"input_norm": norm(config, "operator_norm"), "mlp_norm": norm(config, "ffn_norm")}
    spec = decoder(config, [mixers[kind] for kind in _kinds(config)], mlps, **norms)
    final = norm(config, "model.embedding_norm")
    return replace(spec, final_norm=final, names=replace(spec.names, final_norm=final.name))


def _kinds(config: Config) -> list[str]:
    """Reads the kind of every layer. Raises CheckpointError unless they are of attention and of convolutions."""
    layers, kinds = range(num_layers(config)), config.get("layer_types")
    if kinds is None:
        chosen = config.get("full_attn_idxs")
        if not isinstance(chosen, list | None):
            raise refusal("full_attn_idxs", chosen, "a list of layers")
        kinds = ["full_attention" if chosen is None or layer in chosen else "conv" for layer in layers]
    known = ("conv", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != len(layers) or any(kind not in known for kind in kinds):
        raise refusal("layer_types", kinds, f"a list of {len(layers)} times {' or '.join(known)}")
    if "full_attention" not in kinds:
        raise refusal("layer_types", kinds, "one with full_attention")
    return kinds


def _attention(config: Config) -> Attention:
    mixer = attention(config, rope=rope(config, theta=1e6))
    query, key = (norm(config, f"self_attn.{name}_layernorm", mixer.head_dim) for name in "qk")
    return replace(mixer, qk_norm=(query, key), output=replace(mixer.output, name="self_attn.out_proj"))


def _conv(config: Config) -> ShortConv:
    bias, hidden = flag(config, "conv_bias"), positive(config, "hidden_size")
    inputs = Linear("conv.in_proj", 3 * hidden, hidden, bias)
    output = Linear("conv.out_proj", hidden, hidden, bias, split="rows")
    return ShortConv((inputs,), output, positive(config, "conv_L_cache", 3))
