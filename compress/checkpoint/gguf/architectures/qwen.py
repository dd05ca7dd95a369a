"""Qwen2 and Qwen2.5, with biases on queries, keys and values, Qwen3, with norms of heads, and mixtures of both."""

from __future__ import annotations

from compress.checkpoint.gguf.architectures.base import (
    ARCHITECTURES,
    ATTENTION,
    BLOCK,
    HEAD_NORMS,
    Architecture,
    Config,
    Source,
    expert_names,
    scaled_rope,
)

ACTIVATION = {"hidden_act": "silu"}
MIXTURE = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **expert_names("mlp"),
}
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""The expert that all tokens share."""


def _experts(source: Source) -> Config:
    chosen, inner = source.count("expert_used_count"), source.count("feed_forward_length")
    return {
        **scaled_rope(source),
        "num_experts": source.count("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": source.count("expert_feed_forward_length", max(1, inner // chosen)),
    }


def _with_shared(source: Source) -> Config:
    inner = source.count("feed_forward_length")
    return {
        **_experts(source),
        "shared_expert_intermediate_size": source.count("expert_shared_feed_forward_length", inner),
    }


for each in (
    Architecture("qwen2", ("qwen2",), BLOCK, fixed=ACTIVATION, read=scaled_rope),
    Architecture("qwen3", ("qwen3",), {**BLOCK, **HEAD_NORMS}, fixed=ACTIVATION, read=scaled_rope),
    Architecture(
        "qwen2moe",
        ("qwen2_moe",),
        {**MIXTURE, **SHARED},
        fixed={**ACTIVATION, "norm_topk_prob": False},
        read=_with_shared,
    ),
    Architecture(
        "qwen3moe",
        ("qwen3_moe",),
        {**MIXTURE, **HEAD_NORMS},
        fixed={**ACTIVATION, "norm_topk_prob": True},
        read=_experts,
    ),
):
    ARCHITECTURES.register()(each)
