"""Mistral (arXiv:2310.06825) and Ministral 3: Llama with a sliding window and without biases."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, gated_mlp, number, positive, rope, windows
from compress.models.registry import register
from compress.models.spec import ModelSpec, PositionScale

DEFAULT_WINDOW = 4096
"""Window of a config.json without `sliding_window`, as in transformers; null means none."""


@register("mistral")
def mistral(config: Config) -> ModelSpec:
    """Describes a Mistral."""
    config = {"sliding_window": DEFAULT_WINDOW, **config}
    return decoder(config, [attention(config, window=window) for window in windows(config)], gated_mlp(config))


@register("ministral3")
def ministral3(config: Config) -> ModelSpec:
    """Describes a Ministral 3, whose queries grow with their position."""
    config = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None, **config}
    rotary = rope(config)
    growth = PositionScale(
        number(rotary.options, "llama_4_scaling_beta", 0.1),
        positive(rotary.options, "original_max_position_embeddings"),
    )
    mixers = [attention(config, window=window, rope=rotary, position_scale=growth) for window in windows(config)]
    return decoder(config, mixers, gated_mlp(config))
