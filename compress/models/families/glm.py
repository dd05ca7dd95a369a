"""GLM-4 (arXiv:2406.12793): half of the channels rotate, in neighboring pairs, and norms stand on both sides of
attention and MLP."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, gated_mlp, norm, num_layers, rope
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("glm4")
def glm4(config: Config) -> ModelSpec:
    """Describes a GLM-4; biases of queries, keys and values are the default."""
    config = {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2, **config}
    bias, rotary = flag(config, "attention_bias", True), rope(config, knows_partial=True, interleaved=True)
    mixer = attention(config, qkv_bias=bias, rope=rotary)
    return decoder(
        config,
        [mixer] * num_layers(config),
        gated_mlp(config, fused=True),
        output_norm=norm(config, "post_self_attn_layernorm"),
        mlp_output_norm=norm(config, "post_mlp_layernorm"),
    )
