"""Seed-OSS: Llama whose output projection has a bias of its own."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, gated_mlp, num_layers
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("seed_oss")
def seed_oss(config: Config) -> ModelSpec:
    """Describes a Seed-OSS; biases of queries, keys and values are the default."""
    config = {"head_dim": 128, "num_key_value_heads": 8, **config}
    mixer = attention(config, bias=(flag(config, "attention_bias", True), flag(config, "attention_out_bias")))
    mlp = gated_mlp(config, bias=flag(config, "mlp_bias"))
    return decoder(config, [mixer] * num_layers(config), mlp)
