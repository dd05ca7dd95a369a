"""Attention without pages: whole sequences at once, nothing kept. Used to score text."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.attention.spans import attend_span, visibility_mask


class DenseAttention:
    """Causal attention inside each of B sequences of length T that lie one after the other on the token axis.

    Args:
        windows: sliding window of every layer; None is none.
    """

    def __init__(self, length: int, windows: tuple[int | None, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.length = length
        positions = torch.arange(length, device=device)
        kinds = {window for window in windows if window is not None and window < length}
        masks = {window: visibility_mask(positions, length, window, dtype) for window in kinds}
        self.masks = [None if window is None else masks.get(window) for window in windows]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spans = zip(query.split(self.length), key.split(self.length), value.split(self.length), strict=True)
        return torch.cat([attend_span(q, k, v, self.masks[layer]) for q, k, v in spans])
