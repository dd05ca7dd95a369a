"""Mistral (arXiv:2310.06825), Ministral 3 and Mixtral (arXiv:2401.04088): Llama with a window and without biases."""

from __future__ import annotations

from compress.models.block_parts import PositionScale
from compress.models.config import Config, attention, decoder, gated_mlp, mixture, number, positive, rope, windows
from compress.models.registry import Wrapper, register, register_wrapper
from compress.models.spec import ModelSpec

DEFAULT_WINDOW = 4096
"""Window of a config.json without `sliding_window`, as in transformers; null means none."""


MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary embedding of a Ministral 3 whose config.json has none, as in transformers."""


@register("mistral")
def mistral(config: Config) -> ModelSpec:
    """Describes a Mistral."""
    config = {"sliding_window": DEFAULT_WINDOW, "num_key_value_heads": 8, **config}
    return decoder(config, [attention(config, window=window) for window in windows(config)], gated_mlp(config))


@register("ministral3")
def ministral3(config: Config) -> ModelSpec:
    """Describes a Ministral 3, whose queries grow with their position."""
    config = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None, **config}
    rotary = rope(config if config.get("rope_parameters") else {**config, "rope_parameters": MINISTRAL_ROPE})
    growth = PositionScale(
        number(rotary.options, "llama_4_scaling_beta", 0.1),
        positive(rotary.options, "original_max_position_embeddings"),
    )
    mixers = [attention(config, window=window, rope=rotary, position_scale=growth) for window in windows(config)]
    return decoder(config, mixers, gated_mlp(config))


@register("mixtral")
def mixtral(config: Config) -> ModelSpec:
    """Describes a Mixtral."""
    config = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, **config}
    config = config if "num_experts" in config else {"num_local_experts": 8, **config}
    rotary = rope(config, theta=1e6)
    mixers = [attention(config, window=window, rope=rotary) for window in windows(config)]
    return decoder(config, mixers, mixture(config, name="block_sparse_moe", parts=("w1", "w3", "w2")))


register_wrapper("mistral3", Wrapper("mistral", ties_head=True))
