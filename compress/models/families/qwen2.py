"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): Llama with biases on queries, keys and values."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, gated_mlp, switched_windows
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("qwen2")
def qwen2(config: Config) -> ModelSpec:
    """Describes a Qwen2."""
    config = {"num_key_value_heads": 32, **config}
    mixers = [attention(config, qkv_bias=True, window=window) for window in switched_windows(config)]
    return decoder(config, mixers, gated_mlp(config))
