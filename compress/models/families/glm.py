"""GLM-4 (arXiv:2406.12793), in which half of the channels rotate, in neighboring pairs, and norms stand on both sides
of attention and MLP; and the mixtures GLM-4.5 to 4.7 (arXiv:2508.06471)."""

from __future__ import annotations

from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    mixture,
    norm,
    num_layers,
    number,
    positive,
    rope,
)
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("glm4")
def glm4(config: Config) -> ModelSpec:
    """Describes a GLM-4; biases of queries, keys and values are the default."""
    config = {
        "rms_norm_eps": 1.5625e-7,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        **config,
    }
    bias, rotary = flag(config, "attention_bias", True), rope(config, knows_partial=True, interleaved=True)
    mixer = attention(config, qkv_bias=bias, rope=rotary)
    return decoder(
        config,
        [mixer] * num_layers(config),
        gated_mlp(config, fused=True),
        output_norm=norm(config, "post_self_attn_layernorm"),
        mlp_output_norm=norm(config, "post_mlp_layernorm"),
    )


@register("glm4_moe")
def glm4_moe(config: Config) -> ModelSpec:
    """Describes a GLM-4.5; its first layers are dense."""
    config = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "partial_rotary_factor": 0.5,
        **config,
    }
    bias, layers = flag(config, "attention_bias"), range(num_layers(config))
    mixer = attention(config, qkv_bias=bias, qk_norm=flag(config, "use_qk_norm"), rope=rope(config, knows_partial=True))
    size = positive(config, "moe_intermediate_size")
    experts = mixture(
        config,
        size=size,
        activation="sigmoid",
        normalizes=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
        bias="mlp.gate.e_score_correction_bias",
        num_groups=positive(config, "n_group", 1),
        num_chosen_groups=positive(config, "topk_group", 1),
        in_float32=True,
        shared=gated_mlp(config, name="mlp.shared_experts", size=size * positive(config, "n_shared_experts", 1)),
    )
    num_dense, mlp = int(number(config, "first_k_dense_replace", 1)), gated_mlp(config)
    return decoder(config, [mixer for _ in layers], [experts if layer >= num_dense else mlp for layer in layers])
