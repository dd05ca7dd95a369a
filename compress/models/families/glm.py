"""GLM-4 (arXiv:2406.12793), in which half of the channels rotate, in neighboring pairs, and later norms stand on both
sides of attention and MLP; the mixtures GLM-4.5 to 4.7 (arXiv:2508.06471), of which Flash has latent attention; and
GLM-5, whose latent attention is sparse."""

from __future__ import annotations

from typing import Any

from compress.models.config import (
    SIGMOID_ROUTER,
    Config,
    attention,
    decoder,
    dense_first,
    flag,
    gated_mlp,
    grouped_mixture,
    integer,
    mlps_by_kind,
    num_layers,
    positive,
    refusal,
    rope,
)
from compress.models.mixers.indexer import lightning_indexer
from compress.models.mixers.latent import latent_attention
from compress.models.mtp import with_mtp_layer
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec

LETTERS = {"F": "full", "S": "shared"}
DEFAULTS = {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}


@register("glm")
def glm(config: Config) -> ModelSpec:
    return _dense({**DEFAULTS, **config})


@register("glm4")
def glm4(config: Config) -> ModelSpec:
    """Describes a GLM-4 of 2025, which normalizes what attention and MLP add as well."""
    return _dense({**DEFAULTS, **config}, after=("post_self_attn_layernorm", "post_mlp_layernorm"))


def _dense(config: Config, **norms: Any) -> ModelSpec:
    """Describes a dense model; biases of queries, keys and values are the default."""
    bias, rotary = flag(config, "attention_bias", True), rope(config, knows_partial=True, interleaved=True)
    mixer = attention(config, bias=(bias, False), rope=rotary)
    return decoder(config, [mixer] * num_layers(config), gated_mlp(config, fused=True), **norms)


WRAPPERS.register("glm4v")(
    Wrapper(
        "glm4v_text",
        {"glm4v_text": "glm4"},
        {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "attention_bias": True},
        unread=("attention_bias", "head_dim"),
        text_ties=True,
        is_flat=True,
        divides_heads=True,
    )
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
    bias = flag(config, "attention_bias")
    mixer = attention(
        config, bias=(bias, False), qk_norm=flag(config, "use_qk_norm"), rope=rope(config, knows_partial=True)
    )
    experts = grouped_mixture(config, **SIGMOID_ROUTER)
    return with_mtp_layer(decoder(config, [mixer] * num_layers(config), dense_first(config, experts, 1)))


WRAPPERS.register("glm4v_moe")(
    Wrapper(
        "glm4v_moe_text",
        {"glm4v_moe_text": "glm4_moe"},
        {"attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": False},
        unread=("use_qk_norm",),
        text_ties=True,
    )
)


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
    experts = grouped_mixture(config, **SIGMOID_ROUTER)
    layers = mlps_by_kind(config, experts, dense_first({**config, "first_k_dense_replace": 1}, experts, 1))
    return with_mtp_layer(decoder(config, [mixer] * len(layers), layers))


@register("glm_moe_dsa")
def glm_moe_dsa(config: Config) -> ModelSpec:
    """Describes a GLM-5, whose layers choose the tokens that they see, or take the choice of an earlier one
    (arXiv:2603.12201)."""
    config = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 2048,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        **config,
    }
    rotary = rope(config, interleaved=True)
    own = latent_attention(config, rotary, indexer=lightning_indexer(config, interleaved=True))
    mixers = [
        own if source == layer else latent_attention(config, rotary, index_layer=source)
        for layer, source in enumerate(_index_sources(config))
    ]
    experts = grouped_mixture(config, **SIGMOID_ROUTER)
    return with_mtp_layer(decoder(config, mixers, mlps_by_kind(config, experts, dense_first(config, experts, 3))), own)


def _index_sources(config: Config) -> list[int]:
    """Reads for each layer the one whose indexer it uses: of `indexer_types`, of a pattern, or of a schedule. Raises
    CheckpointError: not one kind for each layer, an unknown kind, or a first layer that has none."""
    count, kinds = num_layers(config), config.get("indexer_types")
    key = "index_topk_pattern" if kinds is None else "indexer_types"
    kinds = config.get("index_topk_pattern") if kinds is None else kinds
    if kinds is None:
        period, offset = max(integer(config, "index_topk_freq", 1), 1), integer(config, "index_skip_topk_offset", 2)
        kinds = ["shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(count)]
    kinds = [LETTERS.get(letter, letter) for letter in kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or len(kinds) < count or not {*map(str, kinds)} <= {*LETTERS.values()}:
        raise refusal(key, kinds, "full or shared for each layer")
    if kinds[0] == "shared":
        raise refusal(key, kinds, "full in the first layer")
    sources: list[int] = []
    for layer, kind in enumerate(kinds[:count]):
        sources.append(sources[-1] if kind == "shared" else layer)
    return sources
