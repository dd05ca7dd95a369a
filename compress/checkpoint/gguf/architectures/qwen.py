"""Qwen2 and Qwen2.5, with biases on queries, keys and values, and Qwen3, with norms of heads."""

from __future__ import annotations

from compress.checkpoint.gguf.architectures.base import BLOCK, HEAD_NORMS, Architecture, scaled_rope

ACTIVATION = {"hidden_act": "silu"}

ARCHITECTURES = (
    Architecture("qwen2", ("qwen2",), BLOCK, fixed=ACTIVATION, read=scaled_rope),
    Architecture("qwen3", ("qwen3",), {**BLOCK, **HEAD_NORMS}, fixed=ACTIVATION, read=scaled_rope),
)
