"""Hunyuan dense: Llama with norms of query and key heads after the rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from compress.models.config import Config, attention, decoder, flag, gated_mlp, norm, num_layers
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("hunyuan_v1_dense")
def hunyuan_v1_dense(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    mixer = attention(config, bias=flag(config, "attention_bias"), norms_rotated=True)
    names = "self_attn.query_layernorm", "self_attn.key_layernorm"
    query, key = (norm(config, name, mixer.head_dim) for name in names)
    mixer = replace(mixer, qk_norm=(query, key))
    return decoder(config, [mixer] * num_layers(config), gated_mlp(config))
