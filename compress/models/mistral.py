"""Mistral (arXiv:2310.06825): Llama with a sliding window and without biases."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, gated_mlp, windows
from compress.models.registry import register
from compress.models.spec import ModelSpec

DEFAULT_WINDOW = 4096
"""Window of a config.json without `sliding_window`, as in transformers; null means none."""


@register("mistral")
def mistral(config: Config) -> ModelSpec:
    """Describes a Mistral."""
    config = {"sliding_window": DEFAULT_WINDOW, **config}
    return decoder(config, [attention(config, window=window) for window in windows(config)], gated_mlp(config))
