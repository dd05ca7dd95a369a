"""Gemma 1 to 3 (arXiv:2403.08295, arXiv:2503.19786): norms that store the distance of their weights to 1, and scaled
embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.common.errors import CheckpointError
from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    layer_types,
    num_layers,
    number,
    positive,
    refusal,
    ropes_by_kind,
    windows,
)
from compress.models.mixers.attention import Attention
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec

COMMON = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
FROM_ONE = {"offset": 1.0}
"""Norms whose stored weights count from 1."""


@register("gemma")
def gemma(config: Config) -> ModelSpec:
    """Describes a Gemma 1. Raises CheckpointError: attention to later tokens."""
    _refuse_later_tokens(config)
    config = {**COMMON, "num_key_value_heads": 16, **config}
    if config["hidden_act"] == "gelu":  # Gemma was released with this name for the approximation, which it computes
        config = {**config, "hidden_act": COMMON["hidden_act"]}
    mixer = attention(config, bias=flag(config, "attention_bias"))
    return _decoder(config, [mixer] * num_layers(config))


@register("gemma3_text")
def gemma3_text(config: Config) -> ModelSpec:
    """Describes the text part of a Gemma 3: five layers with a window, then one without and with another theta. Raises
    CheckpointError: attention to later tokens."""
    config = _read({"num_key_value_heads": 4, "sliding_window": 4096, **config})
    thetas = {
        "full_attention": number(config, "rope_theta", 1e6),
        "sliding_attention": number(config, "rope_local_base_freq", 1e4),
    }
    kinds, ropes = layer_types(config, positive(config, "sliding_window_pattern", 6)), ropes_by_kind(config, thetas)
    mixers = [
        _mixer(config, qk_norm=FROM_ONE, window=window, rope=ropes[kind])
        for window, kind in zip(windows(config, kinds), kinds, strict=True)
    ]
    return _decoder(config, mixers, norms=BEFORE, after=AFTER)


DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
"""Sizes that published checkpoints leave out where they are those of transformers."""
WRAPPERS.register("gemma3")(
    Wrapper("gemma3_text", defaults=DEFAULTS, unread=("final_logit_softcapping",), ties_head=True)
)

# Its prompts attend to later tokens, which is refused.
WRAPPERS.register("paligemma")(Wrapper("gemma", defaults={"use_bidirectional_attention": True}, ties_head=True))

BEFORE = "input_layernorm", "pre_feedforward_layernorm"
AFTER = "post_attention_layernorm", "post_feedforward_layernorm"


@register("gemma2")
def gemma2(config: Config) -> ModelSpec:
    """Describes a Gemma 2: every second layer has a window, scores and logits are capped. Raises CheckpointError:
    attention to later tokens."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = _read({"num_key_value_heads": 4, "sliding_window": 4096, **caps, **config})
    seen = windows(config, layer_types(config, 2))
    cap = _cap(config, "attn_logit_softcapping")
    return _decoder(config, [_mixer(config, window=window, softcap=cap) for window in seen], norms=BEFORE, after=AFTER)


def _refuse_later_tokens(config: Config) -> None:
    if flag(config, "use_bidirectional_attention"):
        raise CheckpointError("attention to later tokens (use_bidirectional_attention) is not supported", "Use Gemma 3")


def _read(config: Config) -> Config:
    _refuse_later_tokens(config)
    config = {**COMMON, **config}
    return {**config, "hidden_act": config.get("hidden_activation") or config["hidden_act"]}


def _mixer(config: Config, **options: Any) -> Attention:
    bias, divisor = flag(config, "attention_bias"), number(config, "query_pre_attn_scalar", 256)
    if divisor == 0:
        raise refusal("query_pre_attn_scalar", divisor, "above 0")
    return attention(config, bias=bias, scale=divisor**-0.5, **options)


def _cap(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def _decoder(config: Config, mixers: Sequence[Attention], **norms: Any) -> ModelSpec:
    spec = decoder(config, mixers, gated_mlp(config), style=FROM_ONE, **norms)
    cap = _cap(config, "final_logit_softcapping")
    return replace(spec, embedding_scale=spec.hidden_size**0.5, logit_softcap=cap)
