"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783) and the many models that took over its blocks."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, gated_mlp, num_layers
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec


@register("llama")
def llama(config: Config) -> ModelSpec:
    """Describes a Llama: biases where config.json announces them, no windows."""
    mixer = attention(config, bias=flag(config, "attention_bias"))
    mlp = gated_mlp(config, bias=flag(config, "mlp_bias"))
    return decoder(config, [mixer] * num_layers(config), mlp)


# Files of LLaVA leave sizes out that are those of Llama 2 and of Mistral with 7B parameters.
SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
WRAPPERS.register("llava")(Wrapper("llama", defaults=SIZES, text_ties=True))
WRAPPERS.register("llava_next")(Wrapper("llama", defaults=SIZES))
WRAPPERS.register("llava_onevision")(Wrapper("qwen2", text_ties=True))
WRAPPERS.register("internvl")(Wrapper("qwen2", ties_head=True))
