"""Attention of one span or of many short ones over gathered keys and values: plain torch, any dtype, any device.

Query heads that share a key-value head are folded into its rows instead of repeating keys and values: on CPUs the fused
kernel is many times slower with `enable_gqa` or with repeated heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Bounds scores smoothly to `(-cap, cap)` (arXiv:2408.00118, section 2)."""
    return (scores / cap).tanh().mul_(cap)


SINK_CHANNELS = 8
"""Channels that a sink key adds; fused kernels take heads of a multiple of 8."""


def add_sink_key(query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Appends a key without a value, whose score is the sink logit `[heads]` of each head.

    Args:
        query: `[n, heads, D]`.
        key, value: `[..., L, kv_heads, D]`.

    Returns:
        The same with `D + SINK_CHANNELS` channels and `L + 1` keys, for scores that are divided by the root of D.
    """
    head_dim = query.shape[-1]
    query = functional.pad(query, (0, SINK_CHANNELS))
    query[..., head_dim] = sink_logits * head_dim**0.5
    key, value = (functional.pad(part, (0, SINK_CHANNELS, 0, 0, 0, 1)) for part in (key, value))
    key[..., -1, :, head_dim] = 1
    return query, key, value


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    softcap: float | None,
    scale: float | None = None,
) -> Tensor:
    """`scaled_dot_product_attention`, with scores that may be capped: those are computed in at least float32."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = soft_cap(query.to(dtype) @ key.to(dtype).mT * (scale or query.shape[-1] ** -0.5), softcap)
    if is_causal:
        mask = scores.new_full(scores.shape[-2:], float("-inf")).triu(1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value.to(dtype)).to(query.dtype)


def _attend_with_sink_key(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor,
) -> Tensor:
    """`attend_span`, or `attend_tokens`, with `add_sink_key`."""
    parts, head_dim = add_sink_key(query, key, value, sink_logits), query.shape[-1]
    seen = None if mask is None else functional.pad(mask, (0, 1))
    return attend(*parts, seen, softcap, scale=head_dim**-0.5)[..., :head_dim]


def attend_span(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """A span of one sequence over its keys: query `[n, heads, D]`, key and value `[L, kv_heads, D]` -> `[n, heads, D]`.

    Args:
        mask: additive `[n, L]`; None is causal and needs n == L.
        sink_logits: `[heads]`, see `add_sink_key`.
        scale: factor on scores; None is `D ** -0.5`.
    """
    if sink_logits is not None:
        if mask is None:
            mask = visibility_mask(torch.arange(len(query), device=query.device), len(query), None, query.dtype)
        return _attend_with_sink_key(attend_span, query, key, value, mask, softcap, sink_logits)
    num_tokens, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = key.shape
    shared = num_heads // num_kv_heads
    folded = query.view(num_tokens, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, shared, length, head_dim)
    keys, values = (part.transpose(0, 1).unsqueeze(1).expand(shape) for part in (key, value))
    attended = attend(folded, keys, values, mask, mask is None, softcap, scale)
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def attend_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """q tokens of each of B sequences, one sequence after the other: query `[B * q, heads, D]`, key and value
    `[B, L, kv_heads, D]` -> `[B * q, heads, D]`.

    Args:
        mask: additive `[B * q, L]`; None when every key counts.
        sink_logits, scale: see `attend_span`.
    """
    if sink_logits is not None:
        return _attend_with_sink_key(attend_tokens, query, key, value, mask, softcap, sink_logits)
    num_rows, num_heads, head_dim = query.shape
    batch, length, num_kv_heads, _ = key.shape
    shared = num_heads // num_kv_heads
    folded = query.view(batch, -1, num_kv_heads, shared, head_dim).transpose(1, 2).flatten(2, 3)
    if mask is not None:
        each = num_rows // batch
        mask = mask.view(batch, 1, each, 1, length).expand(-1, -1, -1, shared, -1).flatten(2, 3)
    attended = attend(folded, key.transpose(1, 2), value.transpose(1, 2), mask, False, softcap, scale)
    return torch.unflatten(attended, 2, (-1, shared)).transpose(1, 2).reshape(num_rows, num_heads, head_dim)


def visibility_mask(
    positions: Tensor,
    num_keys: int,
    window: int | None,
    dtype: torch.dtype,
    sinks: int = 0,
    tree: tuple[Tensor, Tensor] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Additive `[..., num_keys]`: 0 where the token at `positions [...]` may look at key k, minus infinity elsewhere.

    It sees keys at its own position and before; with a window only the last `window` of them, and the first `sinks`.

    Args:
        tree: int64 `[...]` each: a first key, and a bit for it and each key after it that says whether the token sees
            that key; it sees all keys before the first. No branch is longer than the window.
        chunk: tokens of a chunk; it sees keys of its own only.
    """
    keys = torch.arange(num_keys, device=positions.device)
    last = positions.unsqueeze(-1)
    hidden = keys > last
    if tree is not None:
        offset = keys - tree[0].unsqueeze(-1)
        hidden = (offset >= 0) & (tree[1].unsqueeze(-1) >> offset.clamp(0, 63) & 1 == 0)
    if window is not None:
        hidden = hidden | (keys <= last - window) & (keys >= sinks)
    if chunk is not None:
        hidden = hidden | (keys < last // chunk * chunk)
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
