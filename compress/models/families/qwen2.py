"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): Llama with biases on queries, keys and values."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, gated_mlp, switched_windows
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec


@register("qwen2")
def qwen2(config: Config) -> ModelSpec:
    config = {"num_key_value_heads": 32, **config}
    mixers = [attention(config, bias=(True, False), window=window) for window in switched_windows(config)]
    return decoder(config, mixers, gated_mlp(config))


# Positions of text are the same in all sections of a multimodal rotary embedding, which makes it a plain one.
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6}
for name in ("qwen2_vl", "qwen2_5_vl"):
    WRAPPERS.register(name)(Wrapper(f"{name}_text", {f"{name}_text": "qwen2"}, DEFAULTS, text_ties=True, is_flat=True))
