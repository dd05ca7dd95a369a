"""Youtu-LLM: a dense model with latent attention."""

from __future__ import annotations

from compress.models.config import Config, decoder, flag, gated_mlp, num_layers, rope
from compress.models.mixers.latent import latent_attention
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("youtu")
def youtu(config: Config) -> ModelSpec:
    config = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        **config,
    }
    mixer = latent_attention(config, rope(config, interleaved=flag(config, "rope_interleave", True)))
    return decoder(config, [mixer] * num_layers(config), gated_mlp(config))
