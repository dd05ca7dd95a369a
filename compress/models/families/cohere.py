"""Command R7B and Command A (arXiv:2504.00698): attention and MLP read one LayerNorm, and only layers with a window
have positions."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    layer_types,
    number,
    positive,
    rope,
    windows,
)
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec


@register("cohere2")
def cohere2(config: Config) -> ModelSpec:
    """Describes a Cohere 2: three layers with a window, then one without."""
    config = {"sliding_window": 4096, "tie_word_embeddings": True, **config}
    config = {**config, "rms_norm_eps": number(config, "layer_norm_eps", 1e-5)}
    bias, rotary = flag(config, "attention_bias"), rope(config, interleaved=True)
    period = positive(config, "sliding_window_pattern", 4)
    mixers = [
        attention(config, bias=bias, window=window, rope=None if window is None else rotary)
        for window in windows(config, layer_types(config, period))
    ]
    style = {"centered": True}
    spec = decoder(config, mixers, gated_mlp(config), norms=("input_layernorm", None), style=style, is_parallel=True)
    return replace(spec, logit_scale=number(config, "logit_scale", 0.0625))


WRAPPERS.register("aya_vision")(Wrapper("cohere2", ties_head=True))
