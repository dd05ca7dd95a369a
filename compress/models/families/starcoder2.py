"""StarCoder 2 (arXiv:2402.19173): LayerNorms with biases and an MLP without a gate."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, flag, number, plain_mlp, windows
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("starcoder2")
def starcoder2(config: Config) -> ModelSpec:
    """Describes a StarCoder 2; biases are the default."""
    config = {"tie_word_embeddings": True, "num_key_value_heads": 2, **config}
    config = {**config, "rms_norm_eps": number(config, "norm_epsilon", 1e-5)}
    bias = flag(config, "use_bias", True)
    mixers = [attention(config, bias=bias, window=window) for window in windows(config)]
    mlp = plain_mlp(config, "c_fc", "c_proj", "gelu_pytorch_tanh", bias=bias)
    return decoder(config, mixers, mlp, style={"centered": True, "bias": True})
