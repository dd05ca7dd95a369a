"""Mamba-2 (arXiv:2405.21060): state space models in all layers, without attention and without MLPs."""

from __future__ import annotations

from compress.models.block import Block
from compress.models.config import Config, flag, norm, num_layers, number, positive
from compress.models.mixers.mamba_config import mamba2
from compress.models.registry import register
from compress.models.spec import ModelSpec, TensorNames

NAMES = TensorNames("backbone.layers", "backbone.embeddings", "backbone.norm_f")
DEFAULTS = {"hidden_size": 4096, "vocab_size": 32768, "num_hidden_layers": 64, "n_groups": 8, "state_size": 128}
KEYS = {
    "heads": "num_heads",
    "groups": "n_groups",
    "head_dim": "head_dim",
    "state": "state_size",
    "kernel": "conv_kernel",
    "expand": "expand",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "activation": "hidden_act",
}


@register("mamba2")
def mamba2_model(config: Config) -> ModelSpec:
    config = {**DEFAULTS, "head_dim": 64, **config, "rms_norm_eps": number(config, "layer_norm_epsilon", 1e-5)}
    block = Block(norm(config, "norm"), mamba2(config, name="mixer", keys=KEYS), None, None)
    return ModelSpec(
        positive(config, "hidden_size"),
        positive(config, "vocab_size"),
        (block,) * num_layers(config),
        norm(config, NAMES.final_norm),
        flag(config, "tie_word_embeddings"),
        names=NAMES,
    )
