"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): q, k and v are one matrix, gate and up another; and
Phi-3.5-MoE, in which they are not."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import (
    LENGTH,
    Config,
    attention,
    block,
    decoder,
    flag,
    gated_mlp,
    mixture,
    number,
    refusal,
    rope,
    windows,
)
from compress.models.registry import register
from compress.models.rope import Rope
from compress.models.spec import ModelSpec


@register("phi3")
def phi3(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, **config}
    rotary = rope(config, knows_partial=True, older_names={"su": "longrope", "yarn": "longrope"})
    mixers = [attention(config, fused=True, window=window, rope=rotary) for window in windows(config)]
    return decoder(config, mixers, gated_mlp(config, fused=True))


@register("phimoe")
def phimoe(config: Config) -> ModelSpec:
    """Describes a Phi-3.5-MoE: LayerNorms with biases, and two experts for each token."""
    config = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "max_position_embeddings": 131072,
        **config,
        "num_experts_per_tok": 2,
    }
    inner = (block(config, "rope_scaling") or block(config, "rope_parameters")).get(LENGTH)
    config = config if inner is None else {**config, LENGTH: inner}
    bias, rotary = flag(config, "attention_bias"), _scaled(rope(config, theta=1e6))
    mixers = [attention(config, bias=bias, window=window, rope=rotary) for window in windows(config)]
    experts = mixture(
        config,
        name="block_sparse_moe",
        parts=("w1", "w3", "w2"),
        activation="sparsemixer",
        margin=2 * number(config, "router_jitter_noise", 0.01),
    )
    spec = decoder(config, mixers, experts, style={"centered": True, "bias": True})
    return replace(spec, head_bias=flag(config, "lm_head_bias"))


def _scaled(rotary: Rope) -> Rope:
    """Takes the scales of LongRoPE from numbers of their own. Raises CheckpointError: another scaled kind, to which
    transformers applies these numbers too."""
    if rotary.type == "default":
        return rotary
    if rotary.type != "longrope":
        raise refusal("rope_type", rotary.type, "default or longrope")
    scales = [number(rotary.options, key) for key in ("short_mscale", "long_mscale")]
    return replace(rotary, options={**rotary.options, "scales": scales})
