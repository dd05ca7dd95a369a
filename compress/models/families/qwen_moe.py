"""Mixtures of Qwen2 and Qwen3 (arXiv:2407.10671, arXiv:2505.09388)."""

from __future__ import annotations

from compress.common.errors import CheckpointError
from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    mixture,
    num_layers,
    number,
    positive,
    switched_windows,
)
from compress.models.linear import Linear
from compress.models.mlp import MLP, Mixture
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec
from compress.models.stacks import Stack
from compress.models.wrappers import OUTER


@register("qwen2_moe")
def qwen2_moe(config: Config) -> ModelSpec:
    """Describes a mixture of Qwen2, with an expert that all tokens share."""
    config = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_key_value_heads": 16,
        **config,
    }
    size = positive(config, "shared_expert_intermediate_size")
    experts = mixture(
        config,
        size=positive(config, "moe_intermediate_size"),
        normalizes=flag(config, "norm_topk_prob"),
        shared=gated_mlp(config, name="mlp.shared_expert", size=size),
        shared_gate=Linear("mlp.shared_expert_gate", 1, positive(config, "hidden_size")),
    )
    bias, layers = flag(config, "qkv_bias", True), range(num_layers(config))
    last = int(number(config, "max_window_layers", 28))
    kinds = ["full_attention" if layer % 2 or layer >= last else "sliding_attention" for layer in layers]
    seen = switched_windows(config, config.get("layer_types") or kinds)
    mixers = [attention(config, bias=(bias, False), window=window) for window in seen]
    return decoder(config, mixers, layers_of(config, experts, len(mixers)))


@register("qwen3_moe")
def qwen3_moe(config: Config) -> ModelSpec:
    config = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        **config,
    }
    experts = mixture(
        config,
        size=positive(config, "moe_intermediate_size"),
        normalizes=flag(config, "norm_topk_prob"),
        stacks=_stacks(config) if OUTER in config else (),
    )
    mixers = [
        attention(config, bias=flag(config, "attention_bias"), qk_norm=True, window=window)
        for window in switched_windows(config, ["sliding_attention"] * num_layers(config))
    ]
    return decoder(config, mixers, layers_of(config, experts, len(mixers)))


def _stacks(config: Config) -> tuple[Stack, ...]:
    """Returns those of a Qwen3-VL, published `[in_features, out_features]` and saved by transformers as it reads them,
    which it tells by their shape."""
    hidden, inner = positive(config, "hidden_size"), positive(config, "moe_intermediate_size")
    gate_up, down = ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)
    return (
        Stack("mlp.experts.gate_up_proj", gate_up, transposed=hidden != 2 * inner, columns=hidden),
        Stack("mlp.experts.down_proj", down, transposed=hidden != inner, columns=inner),
    )


WRAPPERS.register("qwen3_vl_moe")(
    Wrapper(
        "qwen3_vl_moe_text",
        {"qwen3_vl_moe_text": "qwen3_moe"},
        {
            **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "num_key_value_heads": 16},
            **{"norm_topk_prob": True, "rope_theta": 5e5, "use_sliding_window": False},
        },
        unread=("norm_topk_prob", "use_sliding_window", "sliding_window"),
    )
)


def layers_of(config: Config, experts: Mixture, count: int) -> list[MLP | Mixture]:
    """Reads which layers are mixtures; the others have an MLP. Raises CheckpointError: `mlp_only_layers` that is not
    a list of layers."""
    step, dense = positive(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not set(dense) <= set(range(count)):
        raise CheckpointError(f"mlp_only_layers is {dense!r}, not a list of layers", "Check config.json")
    mlp = gated_mlp(config)
    return [mlp if layer in dense or (layer + 1) % step else experts for layer in range(count)]
