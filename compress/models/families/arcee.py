"""Arcee (AFM): Llama with an MLP of squared ReLU without a gate."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, num_layers, plain_mlp
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("arcee")
def arcee(config: Config) -> ModelSpec:
    mixer = attention(config, bias=flag(config, "attention_bias"))
    mlp = plain_mlp(config, "up_proj", "down_proj", "relu2", bias=flag(config, "mlp_bias"))
    return decoder({"rms_norm_eps": 1e-5, **config}, [mixer] * num_layers(config), mlp)
