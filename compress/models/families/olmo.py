"""OLMo 2 and 3 (arXiv:2501.00656, arXiv:2512.13961), with norms after attention and MLP, and OLMoE (arXiv:2409.02060):
all have norms over all query heads and all key heads at once."""

from __future__ import annotations

from typing import Any

from compress.common.errors import UnsupportedModelError
from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    layer_types,
    mixture,
    num_layers,
    number,
    ropes_by_kind,
    wide_norms,
    windows,
)
from compress.models.mixers.attention import Attention
from compress.models.registry import register
from compress.models.spec import ModelSpec

DEFAULTS = {"rms_norm_eps": 1e-5}
DEFAULT_THETA = 500_000.0
"""Base of the rotary embeddings of an OLMo 3."""


@register("olmo2")
def olmo2(config: Config) -> ModelSpec:
    config = {**DEFAULTS, **config}
    return post_norm_decoder(config, [_mixer(config)] * num_layers(config))


@register("olmo3")
def olmo3(config: Config) -> ModelSpec:
    """Describes an OLMo 3: three layers with a window, then one without."""
    config = {**DEFAULTS, "sliding_window": 4096, **config}
    kinds = layer_types(config, 4)
    seen = windows(config, kinds)
    # As in transformers, a theta outside of the parameters of both kinds is that of full attention.
    thetas = {"full_attention": number(config, "rope_theta", DEFAULT_THETA), "sliding_attention": DEFAULT_THETA}
    ropes = ropes_by_kind(config, thetas)
    mixers = [_mixer(config, window=window, rope=ropes[kind]) for window, kind in zip(seen, kinds, strict=True)]
    return post_norm_decoder(config, mixers)


@register("olmoe")
def olmoe(config: Config) -> ModelSpec:
    """Describes an OLMoE. Raises UnsupportedModelError: queries, keys and values are clipped."""
    if config.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            "clipped queries, keys and values (clip_qkv) are not supported", "Serve it with transformers"
        )
    config = {**DEFAULTS, "num_experts": 64, "num_experts_per_tok": 8, **config}
    mixer = wide_norms(config, attention(config, bias=flag(config, "attention_bias")))
    experts = mixture(config, normalizes=flag(config, "norm_topk_prob"))
    return decoder(config, [mixer] * num_layers(config), experts)


def _mixer(config: Config, **options: Any) -> Attention:
    return wide_norms(config, attention(config, bias=flag(config, "attention_bias"), **options), in_float32=True)


def post_norm_decoder(config: Config, mixers: list[Attention]) -> ModelSpec:
    """Composes a decoder whose mixers and MLPs read the residual stream as it is, and whose updates are normalized."""
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    style = {"in_float32": True}
    return decoder(config, mixers, gated_mlp(config), norms=(None, None), after=after, style=style)
