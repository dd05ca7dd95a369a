"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 (arXiv:2405.21060) side by side in every layer, with factors."""

from __future__ import annotations

from dataclasses import replace

from compress.models.block_parts import SecondMixer
from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    num_layers,
    number,
    positive,
    refusal,
)
from compress.models.mixers.attention import Attention
from compress.models.mixers.mamba2 import Mamba2
from compress.models.mixers.mamba_config import mamba2
from compress.models.mlp import MLP
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("falcon_h1")
def falcon_h1(config: Config) -> ModelSpec:
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, **config}
    second = SecondMixer(
        _mamba2(config),
        (number(config, "attention_in_multiplier", 1.0), number(config, "attention_out_multiplier", 1.0)),
        (number(config, "ssm_in_multiplier", 1.0), number(config, "ssm_out_multiplier", 1.0)),
    )
    mixers, norms = [_attention(config)] * num_layers(config), ("input_layernorm", "pre_ff_layernorm")
    spec = decoder(config, mixers, _mlp(config), norms=norms, final="model.final_layernorm", second=second)
    return replace(
        spec,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=number(config, "lm_head_multiplier", 1.0),
    )


def _attention(config: Config) -> Attention:
    """Composes attention; the factor on keys is one on scores."""
    bias, factor = flag(config, "attention_bias"), number(config, "key_multiplier", 1.0)
    mixer = attention(config, bias=bias)
    return mixer if factor == 1.0 else replace(mixer, scale=factor * mixer.head_dim**-0.5)


def _mlp(config: Config) -> MLP:
    gate, output = _factors(config, "mlp_multipliers", 2)
    return replace(gated_mlp(config, bias=flag(config, "mlp_bias"), name="feed_forward"), factors=(gate, output))


def _mamba2(config: Config) -> Mamba2:
    is_derived = "mamba_d_ssm" in config and config["mamba_d_ssm"] is None
    mixer = mamba2(config, None if is_derived else positive(config, "mamba_d_ssm", 1024))
    factors = _factors(config, "ssm_multipliers", 5)
    return replace(
        mixer,
        output=replace(mixer.output, bias=flag(config, "projectors_bias")),
        norm=mixer.norm if flag(config, "mamba_rms_norm") else None,
        norms_before_gate=flag(config, "mamba_norm_before_gate", True),
        factors=() if set(factors) == {1.0} else factors,
    )


def _factors(config: Config, key: str, count: int) -> tuple[float, ...]:
    """Reads as many factors, 1 where there are none. Raises CheckpointError unless they are numbers of 0 or more."""
    found = config.get(key)
    found = [1.0] * count if found is None else found
    if not isinstance(found, list) or len(found) != count:
        raise refusal(key, found, f"{count} numbers")
    return tuple(number({key: factor}, key) for factor in found)
