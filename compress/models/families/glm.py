"""GLM-4 (arXiv:2406.12793), in which half of the channels rotate, in neighboring pairs, and later norms stand on both
sides of attention and MLP; and the mixtures GLM-4.5 to 4.7 (arXiv:2508.06471), of which Flash has latent attention."""

from __future__ import annotations

from compress.models.config import (
    SIGMOID_ROUTER,
    Config,
    attention,
    decoder,
    dense_first,
    flag,
    gated_mlp,
    grouped_mixture,
    norm,
    num_layers,
    positive,
    refusal,
    rope,
)
from compress.models.latent import latent_attention
from compress.models.mtp import layer_behind
from compress.models.registry import register
from compress.models.spec import ModelSpec, Norm

DEFAULTS = {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}


@register("glm")
def glm(config: Config) -> ModelSpec:
    """Describes the first GLM-4."""
    return _dense({**DEFAULTS, **config})


@register("glm4")
def glm4(config: Config) -> ModelSpec:
    """Describes a GLM-4 of 2025, which normalizes what attention and MLP add as well."""
    config = {**DEFAULTS, **config}
    after = norm(config, "post_self_attn_layernorm"), norm(config, "post_mlp_layernorm")
    return _dense(config, output_norm=after[0], mlp_output_norm=after[1])


def _dense(config: Config, **norms: Norm) -> ModelSpec:
    """Describes a dense model; biases of queries, keys and values are the default."""
    bias, rotary = flag(config, "attention_bias", True), rope(config, knows_partial=True, interleaved=True)
    mixer = attention(config, qkv_bias=bias, rope=rotary)
    return decoder(config, [mixer] * num_layers(config), gated_mlp(config, fused=True), **norms)


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
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, qk_norm=flag(config, "use_qk_norm"), rope=rope(config, knows_partial=True))
    experts = grouped_mixture(config, **SIGMOID_ROUTER)
    return layer_behind(decoder(config, [mixer] * num_layers(config), dense_first(config, experts, 1)))


@register("glm4_moe_lite")
def glm4_moe_lite(config: Config) -> ModelSpec:
    """Describes a GLM-4.7-Flash, with latent attention."""
    config = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 20,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": positive(config, "head_dim", 64),
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        **config,
    }
    mixer = latent_attention(config, rope(config, interleaved=flag(config, "rope_interleave", True)))
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers(config) - 1)
    if not isinstance(kinds, list) or len(kinds) != num_layers(config):
        raise refusal("mlp_layer_types", kinds, "a kind for each layer")
    experts, mlp = grouped_mixture(config, **SIGMOID_ROUTER), gated_mlp(config)
    mlps = [experts if kind == "sparse" else mlp for kind in kinds]
    return layer_behind(decoder(config, [mixer] * len(kinds), mlps))
