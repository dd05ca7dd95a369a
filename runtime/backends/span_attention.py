"""Attention of one span or of many short ones over gathered keys and values: plain torch, any dtype, any device.

Query heads that share a key-value head are folded beside it instead of repeating keys and values: on CPUs the fused
kernel is many times slower with `enable_gqa` or with repeated heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Bounds scores smoothly to `(-cap, cap)` (arXiv:2408.00118, section 2)."""
    return (scores / cap).tanh().mul_(cap)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, softcap: float | None
) -> Tensor:
    """`scaled_dot_product_attention`, with scores that may be capped: those are computed in at least float32."""
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = soft_cap(query.to(dtype) @ key.to(dtype).mT * query.shape[-1] ** -0.5, softcap)
    if is_causal:
        mask = scores.new_full(scores.shape[-2:], float("-inf")).triu(1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value.to(dtype)).to(query.dtype)


def attend_span(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None) -> Tensor:
    """A span of one sequence over its keys: query `[n, heads, D]`, key and value `[L, kv_heads, D]` -> `[n, heads, D]`.

    Args:
        mask: additive `[n, L]`; None is causal and needs n == L.
    """
    num_tokens, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = key.shape
    shared = num_heads // num_kv_heads
    folded = query.view(num_tokens, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, shared, length, head_dim)
    keys, values = (part.transpose(0, 1).unsqueeze(1).expand(shape) for part in (key, value))
    attended = attend(folded, keys, values, mask, mask is None, softcap)
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def attend_tokens(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Tensor:
    """q tokens of each of B sequences, one sequence after the other: query `[B * q, heads, D]`, key and value
    `[B, L, kv_heads, D]` -> `[B * q, heads, D]`.

    Args:
        mask: additive `[B * q, L]`; None when every key counts.
    """
    num_rows, num_heads, head_dim = query.shape
    batch, length, num_kv_heads, _ = key.shape
    shared = num_heads // num_kv_heads
    folded = query.view(batch, -1, num_kv_heads, shared, head_dim).transpose(1, 2).flatten(2, 3)
    if mask is not None:
        each = num_rows // batch
        mask = mask.view(batch, 1, each, 1, length).expand(-1, -1, -1, shared, -1).flatten(2, 3)
    attended = attend(folded, key.transpose(1, 2), value.transpose(1, 2), mask, False, softcap)
    return attended.unflatten(2, (-1, shared)).transpose(1, 2).reshape(num_rows, num_heads, head_dim)


def visibility_mask(
    positions: Tensor,
    num_keys: int,
    window: int | None,
    dtype: torch.dtype,
    sinks: int = 0,
    tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Additive `[..., num_keys]`: 0 where the token at `positions [...]` may look at key k, minus infinity elsewhere.

    It sees keys at its own position and before; with a window only the last `window` of them, and the first `sinks`.

    Args:
        tree: int64 `[...]` each: a first key, and a bit for it and each one behind it that says whether the token sees
            it; of the keys before, it sees all. No branch is longer than the window.
    """
    keys = torch.arange(num_keys, device=positions.device)
    last = positions.unsqueeze(-1)
    hidden = keys > last
    if tree is not None:
        offset = keys - tree[0].unsqueeze(-1)
        hidden = (offset >= 0) & (tree[1].unsqueeze(-1) >> offset.clamp(0, 63) & 1 == 0)
    if window is not None:
        hidden = hidden | (keys <= last - window) & (keys >= sinks)
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


class DenseAttention:
    """Causal attention inside each of B sequences of length T that lie one after the other on the token axis.

    Args:
        windows: sliding window of every layer; None is none.
        softcap: see `attend`.
    """

    def __init__(
        self,
        length: int,
        windows: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
        softcap: float | None = None,
    ) -> None:
        self.length, self.softcap = length, softcap
        positions = torch.arange(length, device=device)
        kinds = {window for window in windows if window is not None and window < length}
        masks = {window: visibility_mask(positions, length, window, dtype) for window in kinds}
        self.masks = [None if window is None else masks.get(window) for window in windows]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spans = zip(query.split(self.length), key.split(self.length), value.split(self.length), strict=True)
        return torch.cat([attend_span(q, k, v, self.masks[layer], self.softcap) for q, k, v in spans])
