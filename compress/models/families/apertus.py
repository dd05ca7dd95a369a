"""Apertus (arXiv:2509.14233): Llama with norms of query and key heads and an MLP without a gate, whose activation is
learned."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import Config, attention, decoder, flag, num_layers, plain_mlp, rope
from compress.models.registry import register
from compress.models.spec import ModelSpec

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Rotary embedding of a config.json without one, as in transformers."""


@register("apertus")
def apertus(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 65536, **config}
    if not config.get("rope_scaling"):
        config = {**config, "rope_parameters": config.get("rope_parameters") or ROPE}
    mixer = attention(config, bias=flag(config, "attention_bias"), qk_norm=True, rope=rope(config, theta=12_000_000.0))
    mlp = plain_mlp(config, "up_proj", "down_proj", "xielu")
    mlp = replace(mlp, curve="mlp.act_fn" if mlp.activation == "xielu" else "")
    return decoder(config, [mixer] * num_layers(config), mlp, norms=("attention_layernorm", "feedforward_layernorm"))
