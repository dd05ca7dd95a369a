"""Attention over whole texts as if their keys and values came out of a quantized cache. Used to score text."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_numerics import read_back, rotate_heads
from runtime.attention.spans import attend_span, visibility_mask


class CachedAttention:
    """As `DenseAttention`, but every token reads keys and values, its own included, as a cache gives them back.

    The first `scheme.sinks` tokens, and the last `scheme.recent` ones before a token, are read as they are.

    Args:
        length: T, of each of B sequences that lie one after the other on the token axis.
        windows: sliding window of every layer; None is none.
    """

    def __init__(
        self,
        length: int,
        windows: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
        scheme: KVCacheScheme,
    ) -> None:
        self.length, self.scheme = length, scheme
        positions = torch.arange(length, device=device)
        self.windows = [None if window is None or window >= length else window for window in windows]
        self.masks = {window: _mask(positions, window, scheme.recent, dtype) for window in set(self.windows)}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.scheme.rotate:
            query, key = rotate_heads(query), rotate_heads(key)
        mask = self.masks[self.windows[layer]]
        spans = zip(query.split(self.length), key.split(self.length), value.split(self.length), strict=True)
        return torch.cat([self._attend(q, k, v, mask) for q, k, v in spans])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        kept_key, kept_value = read_back(key, self.scheme.key_format), read_back(value, self.scheme.value_format)
        kept_key[: self.scheme.sinks] = key[: self.scheme.sinks]
        kept_value[: self.scheme.sinks] = value[: self.scheme.sinks]
        if self.scheme.recent:
            kept_key, kept_value = torch.cat((kept_key, key)), torch.cat((kept_value, value))
        return attend_span(query, kept_key, kept_value, mask)


def _mask(positions: Tensor, window: int | None, recent: int, dtype: torch.dtype) -> Tensor | None:
    """Additive `[T, T]`, None where causality says it all; `[T, 2 T]` with recent tokens: each stands there as it comes
    out of the cache, for those that see it from afar, and once more as it is."""
    length = len(positions)
    if not recent:
        return None if window is None else visibility_mask(positions, length, window, dtype)
    seen = visibility_mask(positions, length, window, dtype)
    near = (positions.unsqueeze(-1) - positions) < recent
    hidden = float("-inf")
    return torch.cat((seen.masked_fill(near, hidden), seen.masked_fill(~near, hidden)), -1)
