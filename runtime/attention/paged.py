"""Attention over paged keys and values for one step: plain torch, any dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.attention.spans import attend_span, attend_tokens, visibility_mask
from runtime.batch import AttentionGroup, Batch
from runtime.model.pages import KVPages


class PagedAttention:
    """Stores the step's keys and values, then lets every group of rows look at its sequences' pages.

    A token always reads its keys back from the pages, its own included, so the result does not depend on how a
    prompt was cut into spans or on what else is in the batch.

    Args:
        windows: sliding window of every layer; None is none.
    """

    def __init__(self, pages: KVPages, batch: Batch, windows: tuple[int | None, ...]) -> None:
        self.pages, self.batch, self.windows = pages, batch, windows
        self.masks = {window: [_mask(group, window, pages.dtype) for group in batch.groups] for window in set(windows)}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.pages.write(layer, self.batch.slots, key, value)
        query = self.pages.turn(query)
        masks = self.masks[self.windows[layer]]
        groups = zip(self.batch.groups, masks, strict=True)
        parts = [self._attend(layer, group, query[group.rows], mask) for group, mask in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, group: AttentionGroup, query: Tensor, mask: Tensor | None) -> Tensor:
        key, value = self.pages.gather(layer, group.blocks)
        if group.num_sequences > 1 or len(query) == 1:
            shape = (group.num_sequences, -1, *key.shape[1:])
            key, value = key.view(shape)[:, : group.num_keys], value.view(shape)[:, : group.num_keys]
            return attend_tokens(query, key, value, mask)
        return attend_span(query, key[: group.num_keys], value[: group.num_keys], mask)


def _mask(group: AttentionGroup, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Additive `[rows, num_keys]`, or None when causality says it all."""
    if not group.ragged and (window is None or window >= group.num_keys):
        return None
    return visibility_mask(group.positions, group.num_keys, window, dtype)
