"""MiniCPM3: latent attention in a dense model whose embeddings, residual stream and logits are scaled
(arXiv:2404.06395, section 3)."""

from __future__ import annotations

from dataclasses import replace

from compress.models.block_parts import Residual
from compress.models.config import Config, decoder, flag, gated_mlp, num_layers, number, positive, rope
from compress.models.mixers.latent import latent_attention
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("minicpm3")
def minicpm3(config: Config) -> ModelSpec:
    config = {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "num_key_value_heads": 40,
        "rms_norm_eps": 1e-5,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
        **config,
    }
    layers, hidden = num_layers(config), positive(config, "hidden_size")
    if config.get("v_head_dim") is None:
        config = {**config, "v_head_dim": hidden // positive(config, "num_attention_heads")}
    depth = 1.0 if config["scale_depth"] is None else number(config, "scale_depth") / layers**0.5
    mlp = gated_mlp(config, bias=flag(config, "mlp_bias"))
    spec = decoder(config, [latent_attention(config, rope(config))] * layers, mlp, residual=Residual.scaled(depth))
    return replace(
        spec,
        embedding_scale=number(config, "scale_emb", 12.0),
        logit_scale=positive(config, "dim_model_base", hidden) / hidden,
    )
