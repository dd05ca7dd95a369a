"""StarCoder 2 (arXiv:2402.19173): LayerNorms with biases and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import Config, attention, decoder, flag, norm, number, plain_mlp, windows
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("starcoder2")
def starcoder2(config: Config) -> ModelSpec:
    """Describes a StarCoder 2; biases are the default."""
    config = {"tie_word_embeddings": True, "num_key_value_heads": 2, **config}
    config = {**config, "rms_norm_eps": number(config, "norm_epsilon", 1e-5)}
    bias = flag(config, "use_bias", True)
    mixers = [attention(config, qkv_bias=bias, output_bias=bias, window=window) for window in windows(config)]
    first, second = (
        norm(config, name, centered=True, bias=True) for name in ("input_layernorm", "post_attention_layernorm")
    )
    mlp = plain_mlp(config, "c_fc", "c_proj", "gelu_pytorch_tanh", bias=bias)
    spec = decoder(config, mixers, mlp, input_norm=first, mlp_norm=second)
    return replace(spec, final_norm=replace(first, name=spec.final_norm.name))
