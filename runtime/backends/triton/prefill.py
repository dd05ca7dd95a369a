"""Attention of long spans of prompts by torch's fused kernel, where it computes what the kernel over pages computes: in
16 bits it is several times faster, and what its keys are copied for is little beside a span's products."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.backends.span_attention import LayerScores
from runtime.core.batch import AttentionGroup
from runtime.core.memory_plan import MAX_COPIED_KEYS

MIN_SPAN_TOKENS = 128
"""Tokens of a span from which on copies of its keys are worth it."""
MAX_HEAD_DIM = 256
"""Dimensions of the widest heads that the fused kernels take."""


def span_unsupported_reason(
    group: AttentionGroup, window: int | None, scores: LayerScores, formats: tuple[str, str], head_dim: int
) -> str:
    """Why a group of a step is not one span that sees all keys up to its own tokens in 16 bits; "" when it is.

    Args:
        formats: of keys and of values.
    """
    if group.num_sequences > 1 or len(group.positions) < MIN_SPAN_TOKENS:
        return f"takes one span of {MIN_SPAN_TOKENS} tokens or more"
    if group.num_keys > MAX_COPIED_KEYS:
        return f"copies at most {MAX_COPIED_KEYS} keys"
    if group.ancestors is not None:
        return "knows no trees of drafts"
    if formats != ("16bit", "16bit"):
        return "reads 16-bit keys and values"
    if head_dim > MAX_HEAD_DIM:
        return f"takes heads of up to {MAX_HEAD_DIM} dimensions"
    return _scores_reason(group.num_keys, window, scores)


def _scores_reason(num_keys: int, window: int | None, scores: LayerScores) -> str:
    if min(window or num_keys, scores.chunk or num_keys) < num_keys:
        return "shows every key before a token to it"
    return "changes no scores" if scores.softcap is not None or scores.sink_logits is not None else ""


def attend_span(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention `[n, heads, D]` of the last n of L tokens over these and those before.

    Args:
        query: `[n, heads, D]`.
        key, value: `[L, kv_heads, D]`.
    """
    from torch.nn.attention.bias import causal_lower_right  # which imports TorchDynamo

    queries, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    mask = causal_lower_right(len(query), len(key))
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1)
