"""ERNIE 4.5: Llama that rotates neighboring channels, and its mixtures."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    integer,
    mixture,
    num_layers,
    number,
    positive,
    rope,
)
from compress.models.mlp import MLP, Mixture
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("ernie4_5")
def ernie4_5(config: Config) -> ModelSpec:
    config = {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        **config,
    }
    bias = flag(config, "use_bias")
    mixer = attention(config, bias=bias, rope=rope(config, theta=500_000.0, interleaved=True))
    return decoder(config, [mixer] * num_layers(config), gated_mlp(config, bias=bias))


@register("ernie4_5_moe")
def ernie4_5_moe(config: Config) -> ModelSpec:
    """Describes a mixture of ERNIE 4.5, with experts that all tokens share; its first layers are dense."""
    config = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "tie_word_embeddings": True,
        **config,
    }
    bias, rotary = flag(config, "use_bias"), rope(config, theta=500_000.0, interleaved=True)
    mixers = [attention(config, bias=bias, rope=rotary)] * num_layers(config)
    mlp, experts = gated_mlp(config, bias=bias), _experts(config)
    mlps = [experts if layer in _sparse_layers(config) else mlp for layer in range(len(mixers))]
    return replace(decoder(config, mixers, mlps), head_bias=bias)


def _sparse_layers(config: Config) -> range:
    step, first = positive(config, "moe_layer_interval", 1), integer(config, "moe_layer_start_index", 1)
    last = integer(config, "moe_layer_end_index", -1)
    layers = num_layers(config) if last == -1 else last + 1
    return range(first + (-first - 1) % step, layers, step)


def _experts(config: Config) -> Mixture:
    """Composes the mixture; numbers of experts have names of their own besides the common ones."""
    names = {"num_experts": ("moe_num_experts", 64), "num_experts_per_tok": ("moe_k", 6)}
    config = {**config, **{name: config.get(own, config.get(name, default)) for name, (own, default) in names.items()}}
    size, shared = positive(config, "moe_intermediate_size"), integer(config, "moe_num_shared_experts", 2)
    return mixture(
        config,
        size=size,
        bias="mlp.moe_statics.e_score_correction_bias",
        bias_is_row=True,
        in_float32=True,
        least_sum=number(config, "moe_norm_min", 1e-12),
        shared=_shared(config, size * shared) if shared > 0 else None,
    )


def _shared(config: Config, size: int) -> MLP:
    return gated_mlp(config, name="mlp.shared_experts", size=size, bias=flag(config, "use_bias"))
