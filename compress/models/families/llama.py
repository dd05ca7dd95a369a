"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783) and the many models that took over its blocks."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, gated_mlp, num_layers
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("llama")
def llama(config: Config) -> ModelSpec:
    """Describes a Llama: biases where config.json announces them, no windows."""
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, output_bias=bias)
    mlp = gated_mlp(config, bias=flag(config, "mlp_bias"))
    return decoder(config, [mixer] * num_layers(config), mlp)
