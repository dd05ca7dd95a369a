"""Mistral (arXiv:2310.06825), Ministral 3 and Mixtral (arXiv:2401.04088): Llama with a window and without biases; and
Mistral 4, a mixture with latent attention."""

from __future__ import annotations

from dataclasses import replace

from compress.models.block_parts import PositionScale
from compress.models.config import (
    Config,
    attention,
    decoder,
    dense_first,
    flag,
    gated_mlp,
    grouped_mixture,
    mixture,
    num_layers,
    number,
    positive,
    refusal,
    rope,
    windows,
)
from compress.models.mixers.latent import latent_attention
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.rope import Rope
from compress.models.spec import ModelSpec
from compress.models.stacks import Stack

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
    config = {"sliding_window": DEFAULT_WINDOW, "num_key_value_heads": 8, **config}
    return decoder(config, [attention(config, window=window) for window in windows(config)], gated_mlp(config))


@register("ministral3")
def ministral3(config: Config) -> ModelSpec:
    """Describes a Ministral 3, whose queries grow with their position."""
    config = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None, **config}
    rotary = rope(config if config.get("rope_parameters") else {**config, "rope_parameters": MINISTRAL_ROPE})
    growth = _growth(rotary)
    mixers = [attention(config, window=window, rope=rotary, position_scale=growth) for window in windows(config)]
    return decoder(config, mixers, gated_mlp(config))


def _growth(rotary: Rope) -> PositionScale:
    """Reads the growth of queries with their position."""
    beta = number(rotary.options, "llama_4_scaling_beta", 0.1)
    return PositionScale(beta, positive(rotary.options, "original_max_position_embeddings"))


@register("mixtral")
def mixtral(config: Config) -> ModelSpec:
    config = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, **config}
    config = config if "num_experts" in config else {"num_local_experts": 8, **config}
    rotary = rope(config, theta=1e6)
    mixers = [attention(config, window=window, rope=rotary) for window in windows(config)]
    return decoder(config, mixers, mixture(config, name="block_sparse_moe", parts=("w1", "w3", "w2")))


MISTRAL4 = {
    "moe_intermediate_size": 2048,
    "num_key_value_heads": 32,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 4,
}
MISTRAL4_ROPE = MINISTRAL_ROPE | {
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}
STACKS = (
    Stack("mlp.experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    Stack("mlp.experts.down_proj", ("down_proj.weight",)),
)


@register("mistral4")
def mistral4(config: Config) -> ModelSpec:
    """Describes a Mistral 4. Raises CheckpointError: a share of rotated channels that is not that of the heads."""
    config = {**MISTRAL4, **config}
    config = config if "num_local_experts" in config else {"n_routed_experts": 128, **config}
    rotated, own = positive(config, "qk_rope_head_dim"), positive(config, "qk_nope_head_dim")
    config = {"partial_rotary_factor": rotated / (rotated + own), **config}
    rotary = rope(config if config.get("rope_parameters") else {**config, "rope_parameters": MISTRAL4_ROPE})
    if int((rotated + own) * rotary.partial) != rotated:
        raise refusal("partial_rotary_factor", rotary.partial, f"{rotated} of {rotated + own} channels")
    rotary = replace(rotary, partial=1.0, interleaved=flag(config, "rope_interleave", True))
    mixer = latent_attention(config, rotary, position_scale=_growth(rotary))
    experts = grouped_mixture(config, stacks=STACKS)
    return decoder(config, [mixer] * num_layers(config), dense_first(config, experts, 0))


WRAPPERS.register("mistral3")(Wrapper("mistral", ties_head=True))
