"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): q, k and v are one matrix, gate and up another."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, gated_mlp, rope, windows
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("phi3")
def phi3(config: Config) -> ModelSpec:
    """Describes a Phi-3."""
    config = {"original_max_position_embeddings": 4096, **config}
    rotary = rope(config, knows_partial=True, older_names={"su": "longrope", "yarn": "longrope"})
    mixers = [attention(config, fused=True, window=window, rope=rotary) for window in windows(config)]
    return decoder(config, mixers, gated_mlp(config, fused=True))
