"""Qwen3 (arXiv:2505.09388): Llama with a norm over each query and key head."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, gated_mlp, switched_windows
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec


@register("qwen3")
def qwen3(config: Config) -> ModelSpec:
    config = {"num_key_value_heads": 32, "head_dim": 128, **config}
    mixers = [
        attention(config, bias=flag(config, "attention_bias"), qk_norm=True, window=window)
        for window in switched_windows(config)
    ]
    return decoder(config, mixers, gated_mlp(config))


# Positions of text are the same in all sections of a multimodal rotary embedding, which makes it a plain one.
WRAPPERS.register("qwen3_vl")(
    Wrapper("qwen3_vl_text", {"qwen3_vl_text": "qwen3"}, {"head_dim": 128, "rope_theta": 5e5})
)
