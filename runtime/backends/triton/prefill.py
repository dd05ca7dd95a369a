"""Attention of long spans of prompts over quantized pages: keys and values are copied in 16 bits for torch's fused
kernel, where that computes the same.

The kernel over pages dequantizes keys again for each of its tiles of queries. For 2,048 tokens over 32,768 keys in int4
it takes 7.97 ms on an H200, copies and torch's kernel 3.83 ms; over 16-bit pages it is as fast as torch's.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.backends.scores import LayerScores
from runtime.core.batch import AttentionGroup
from runtime.core.memory_plan import MAX_COPIED_KEYS

MIN_SPAN_TOKENS = 512
"""Tokens of a span from which copying its keys takes less time than it saves (about 330 by the figures above)."""
MAX_HEAD_DIM = 256
"""Dimensions of the widest heads that the fused kernels take."""


def span_unsupported_reason(
    group: AttentionGroup, window: int | None, scores: LayerScores, formats: tuple[str, str], head_dim: int
) -> str:
    """Why a group of a step is not one span that sees all quantized keys up to its own tokens; "" when it is.

    Args:
        formats: of keys and of values.
    """
    if group.num_sequences > 1 or len(group.positions) < MIN_SPAN_TOKENS:
        return f"takes one span of {MIN_SPAN_TOKENS} tokens or more"
    if group.num_keys > MAX_COPIED_KEYS:
        return f"copies at most {MAX_COPIED_KEYS} keys"
    if group.ancestors is not None:
        return "knows no trees of drafts"
    if formats == ("16bit", "16bit"):
        return "is not faster for 16-bit keys and values"
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
