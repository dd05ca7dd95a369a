"""Attention over paged keys and values for one step: plain torch, any dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.attention.spans import attend_span, attend_tokens
from runtime.attention.step_keys import StepKeys


class PagedAttention:
    """Stores the step's keys and values, then lets every group of rows look at its sequences' pages.

    Args:
        windows: sliding window of every layer; None is none.
    """

    def __init__(self, keys: StepKeys, windows: tuple[int | None, ...]) -> None:
        self.keys, self.windows = keys, windows
        dtype = keys.cache.pages.dtype
        self.masks = {
            window: [
                keys.mask(group, window, dtype) if keys.needs_mask(group, window) else None
                for group in keys.batch.groups
            ]
            for window in set(windows)
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = self.keys.cache.turn(query)
        self.keys.write(layer, self.keys.cache.turn(key), value)
        masks = self.masks[self.windows[layer]]
        groups = enumerate(zip(self.keys.batch.groups, masks, strict=True))
        parts = [self._attend(layer, index, query[group.rows], mask) for index, (group, mask) in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, index: int, query: Tensor, mask: Tensor | None) -> Tensor:
        key, value = self.keys.read(layer, index)
        if len(key) > 1 or len(query) == 1:
            return attend_tokens(query, key, value, mask)
        return attend_span(query, key[0], value[0], mask)
