"""ERNIE 4.5: Llama that rotates neighboring channels."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, gated_mlp, num_layers, rope
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("ernie4_5")
def ernie4_5(config: Config) -> ModelSpec:
    """Describes a dense ERNIE 4.5."""
    config = {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        **config,
    }
    bias = flag(config, "use_bias")
    mixer = attention(config, qkv_bias=bias, output_bias=bias, rope=rope(config, theta=500_000.0, interleaved=True))
    return decoder(config, [mixer] * num_layers(config), gated_mlp(config, bias=bias))
