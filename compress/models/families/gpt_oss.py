"""gpt-oss (arXiv:2508.10925): mixtures with clamped experts, and attention with sink logits."""

from __future__ import annotations

from compress.models.clamped_gate import ClampedGate
from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    layer_types,
    mixture,
    number,
    rope,
    windows,
)
from compress.models.registry import register
from compress.models.spec import ModelSpec
from compress.models.stacks import Stack

DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS = "mlp.experts"
STACKS = (
    Stack(f"{EXPERTS}.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), transposed=True, interleaved=True),
    Stack(f"{EXPERTS}.gate_up_proj_blocks", ("gate_proj.weight_packed", "up_proj.weight_packed"), interleaved=True),
    Stack(f"{EXPERTS}.gate_up_proj_scales", ("gate_proj.weight_scale", "up_proj.weight_scale"), interleaved=True),
    Stack(f"{EXPERTS}.gate_up_proj_bias", ("gate_proj.bias", "up_proj.bias"), interleaved=True),
    Stack(f"{EXPERTS}.down_proj", ("down_proj.weight",), transposed=True),
    Stack(f"{EXPERTS}.down_proj_blocks", ("down_proj.weight_packed",)),
    Stack(f"{EXPERTS}.down_proj_scales", ("down_proj.weight_scale",)),
    Stack(f"{EXPERTS}.down_proj_bias", ("down_proj.bias",)),
)
"""In the model's dtype, or in MXFP4 as the checkpoints are published."""


@register("gpt_oss")
def gpt_oss(config: Config) -> ModelSpec:
    config = {**DEFAULTS, "num_local_experts": config.get("num_experts", 128), **config}
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = {**config, "rope_parameters": YARN}
    clamped = ClampedGate(number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0))
    bias, rotary = flag(config, "attention_bias", True), rope(config, theta=150000.0)
    mixers = [
        attention(config, bias=bias, rope=rotary, window=window, sink_logits="self_attn.sinks")
        for window in windows(config, layer_types(config, 2))
    ]
    experts = mixture(config, scores="router", stacks=STACKS, biased=True, clamped=clamped)
    return decoder(config, mixers, experts, style={"in_float32": True})
