"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783) and the many models that took over its blocks."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, gated_mlp, num_layers
from compress.models.registry import Wrapper, register, register_wrapper
from compress.models.spec import ModelSpec


@register("llama")
def llama(config: Config) -> ModelSpec:
    """Describes a Llama: biases where config.json announces them, no windows."""
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, output_bias=bias)
    mlp = gated_mlp(config, bias=flag(config, "mlp_bias"))
    return decoder(config, [mixer] * num_layers(config), mlp)


# Files of LLaVA leave sizes out that are those of Llama 2 and of Mistral with 7B parameters.
SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
register_wrapper("llava", Wrapper("llama", defaults=SIZES, text_ties=True))
register_wrapper("llava_next", Wrapper("llama", defaults=SIZES))
register_wrapper("llava_onevision", Wrapper("qwen2", text_ties=True))
register_wrapper("internvl", Wrapper("qwen2", ties_head=True))
