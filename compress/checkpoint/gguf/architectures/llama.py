"""Llama, Mistral and Mixtral, whose files say `llama`: queries and keys with the channels of a pair side by side."""

from __future__ import annotations

from compress.checkpoint.gguf.architectures.base import (
    ARCHITECTURES,
    BLOCK,
    Architecture,
    Config,
    Source,
    expert_names,
    scaled_rope,
)

MIXTURE = {"ffn_gate_inp": "block_sparse_moe.gate", **expert_names("block_sparse_moe", ("w1", "w3", "w2"))}
PAIRS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def _read(source: Source) -> Config:
    window = source.count("attention.sliding_window") if source.get("attention.sliding_window") else None
    if source.get("expert_count"):
        counts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
        experts = {own: source.count(key) for own, key in counts.items()}
        return {**scaled_rope(source), "model_type": "mixtral", **experts, "sliding_window": window}
    if window is not None:
        return {**scaled_rope(source), "model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {**scaled_rope(source), **{key: name in source.names for key, name in biases.items()}}


ARCHITECTURES.register()(
    Architecture(
        "llama",
        ("llama", "mistral", "mixtral"),
        {**BLOCK, **MIXTURE},
        fixed={"hidden_act": "silu"},
        read=_read,
        interleaved=PAIRS,
    )
)
