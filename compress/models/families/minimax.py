"""MiniMax-M2: a mixture with norms over all query heads and all key heads at once; a part of the channels rotates."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, mixture, num_layers, number, positive, rope, wide_norms
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("minimax_m2")
def minimax_m2(config: Config) -> ModelSpec:
    """Describes a MiniMax-M2."""
    config = {"head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8, **config}
    config = config if "num_experts" in config else {"num_local_experts": 256, **config}
    if config.get("rotary_dim") is not None:
        config = {"partial_rotary_factor": number(config, "rotary_dim") / positive(config, "head_dim"), **config}
    rotary = rope(config, theta=5_000_000.0, knows_partial=True)
    mixer = wide_norms(config, attention(config, rope=rotary))
    experts = mixture(
        config,
        name="block_sparse_moe",
        parts=("w1", "w3", "w2"),
        activation="sigmoid",
        bias="block_sparse_moe.e_score_correction_bias",
    )
    return decoder(config, [mixer] * num_layers(config), experts)
