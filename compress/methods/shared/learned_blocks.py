"""Learned rounding inside block types of GGUF: an offset of every weight, and factors of the float16 numbers from which
scales and minima follow. `learned_rounding` has the algorithm. Integer scales and minima of groups stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding.search import to_half
from compress.checkpoint.scale_search import divided
from compress.checkpoint.weights.coded import CodedWeight
from compress.methods.shared.learned_rounding import (
    INSIDE,
    LARGEST_OFFSET,
    RANGE_SHARE,
    Learning,
    move,
    straight_through,
)


class LearnedBlocks(Learning):
    """Codes in blocks while their rounding is learned.

    Args:
        start: where to begin; with no step taken, `codes()` has its values.

    Attributes:
        stretch: float32, by which the float16 scales and minima of the start are multiplied.
    """

    def __init__(self, weight: Tensor, start: CodedWeight) -> None:
        self._start = start.to(weight.device)
        self._factors = {name: getattr(self._start, name) for name in ("scales", "minima")}
        self._factors = {name: factor for name, factor in self._factors.items() if factor is not None}
        self.stretch = [torch.ones_like(each, dtype=torch.float32) for each in self._factors.values()]
        self._latent = self._within_codes(weight.float())
        self.offset = torch.zeros_like(self._latent, requires_grad=True)
        for each in self.stretch:
            each.requires_grad_()

    @torch.no_grad()
    def values(self) -> Tensor:
        return self._values()

    @torch.no_grad()
    def codes(self) -> CodedWeight:
        codes, _, _ = self._rounded()
        factors = {name: factor.to(torch.float16) for name, factor in self._stretched().items()}
        whole = (codes + self._start.scheme.zero).to(torch.uint8).flatten(1)
        return replace(self._start, qweight=whole, **factors)

    def descend(self, gradient: Tensor, rate: float) -> None:
        with torch.enable_grad():
            self._values().backward(gradient)
        move(self.offset, rate)
        for factor in self.stretch:
            move(factor, rate * RANGE_SHARE)
        with torch.no_grad():
            self.offset.clamp_(-LARGEST_OFFSET, LARGEST_OFFSET)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.offset, *self.stretch

    def _values(self) -> Tensor:
        codes, scales, minima = self._rounded()
        return (codes * scales - minima).flatten(1)

    def _stretched(self) -> dict[str, Any]:
        pairs = zip(self._factors.items(), self.stretch, strict=True)
        return {name: straight_through(factor.float() * stretch, to_half) for (name, factor), stretch in pairs}

    def _scaling(self) -> tuple[Tensor, Tensor]:
        """Scales and minima `[O, G, 1]`, zeros for a type without minima."""
        changed = replace(self._start, **self._stretched())
        scales, minima = changed.group_scales().unsqueeze(-1), changed.group_minima()
        return scales, torch.zeros_like(scales) if minima is None else minima.unsqueeze(-1)

    def _rounded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes less that of zero `[O, G, g]`, with straight-through gradients, and the scaling."""
        scales, minima = self._scaling()
        groups, zero = scales.shape[1], self._start.scheme.zero
        exact = divided(self._latent.unflatten(1, (groups, -1)) + minima, scales)
        moved = straight_through(exact + self.offset.unflatten(1, (groups, -1)), torch.round)
        return moved.clamp(-zero, self._start.scheme.max_code - zero), scales, minima

    @torch.no_grad()
    def _within_codes(self, weight: Tensor) -> Tensor:
        """Return the values nearest to `weight [O, I]` that round to the start's codes, float32."""
        scales, minima = self._scaling()
        codes = self._start.qweight.float().unflatten(1, (scales.shape[1], -1)) - self._start.scheme.zero
        exact = divided(weight.unflatten(1, (scales.shape[1], -1)) + minima, scales)
        return (exact.clamp(codes - INSIDE, codes + INSIDE) * scales - minima).flatten(1)
