"""Learned rounding inside block types of GGUF: an offset of every weight, and factors of the float16 numbers from which
scales and minima follow. `learned_rounding` has the algorithm. Integer scales and minima of groups stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding.search import divided, to_half
from compress.checkpoint.weights.gguf_blocks import BlockIntegers
from compress.methods.shared.learned_rounding import INSIDE, LARGEST_OFFSET, RANGE_SHARE, move, straight_through


class LearnedBlocks:
    """One weight `[O, I]` while its rounding is learned.

    Args:
        weight: `[O, I]`, the target.
        start: where to begin; with no step taken, `codes()` has its values.

    Attributes:
        offset: `[O, I]` float32, added before rounding, in steps of the grid.
        stretch: float32 of the shapes of the start's `factors`, by which these are multiplied.
    """

    def __init__(self, weight: Tensor, start: BlockIntegers) -> None:
        self._start = start.to(weight.device)
        self.stretch = [torch.ones_like(each, dtype=torch.float32) for each in self._start.factors]
        self._latent = self._within_codes(weight.float())
        self.offset = torch.zeros_like(self._latent, requires_grad=True)
        for each in self.stretch:
            each.requires_grad_()

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the dequantized weight `[O, I]` in float32, detached."""
        return self._values()

    @torch.no_grad()
    def codes(self) -> BlockIntegers:
        """Return the rounded weight; its values are `values()`."""
        codes, _, _ = self._rounded()
        factors = [each.to(torch.float16) for each in self._factors()]
        return self._start.with_factors(*factors).with_codes((codes + self._start.zero).to(torch.uint8).flatten(1))

    def descend(self, gradient: Tensor, rate: float) -> None:
        """Step each learned parameter against the sign of its gradient: offsets by `rate`.

        Args:
            gradient: float32 `[O, I]`, of the loss with respect to `values()`.
        """
        with torch.enable_grad():
            self._values().backward(gradient)
        move(self.offset, rate)
        for factor in self.stretch:
            move(factor, rate * RANGE_SHARE)
        with torch.no_grad():
            self.offset.clamp_(-LARGEST_OFFSET, LARGEST_OFFSET)

    def state(self) -> tuple[Tensor, ...]:
        """Return a copy of the learned parameters."""
        return tuple(each.detach().clone() for each in (self.offset, *self.stretch))

    @torch.no_grad()
    def restore(self, state: tuple[Tensor, ...]) -> None:
        """Goes back to a state."""
        for tensor, saved in zip((self.offset, *self.stretch), state, strict=True):
            tensor.copy_(saved)

    def _values(self) -> Tensor:
        codes, scales, minima = self._rounded()
        return (codes * scales - minima).flatten(1)

    def _factors(self) -> list[Tensor]:
        pairs = zip(self._start.factors, self.stretch, strict=True)
        return [straight_through(factor.float() * stretch, to_half) for factor, stretch in pairs]

    def _scaling(self) -> tuple[Tensor, Tensor]:
        """Scales and minima `[O, G, 1]`, zeros for a type without minima."""
        changed = self._start.with_factors(*self._factors())
        scales, minima = changed.scales.unsqueeze(-1), changed.minima
        return scales, torch.zeros_like(scales) if minima is None else minima.unsqueeze(-1)

    def _rounded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes less that of zero `[O, G, g]`, with straight-through gradients, and the scaling."""
        scales, minima = self._scaling()
        groups, zero = scales.shape[1], self._start.zero
        exact = divided(self._latent.unflatten(1, (groups, -1)) + minima, scales)
        moved = straight_through(exact + self.offset.unflatten(1, (groups, -1)), torch.round)
        return moved.clamp(-zero, self._start.scheme.max_code - zero), scales, minima

    @torch.no_grad()
    def _within_codes(self, weight: Tensor) -> Tensor:
        """Return the values nearest to `weight [O, I]` that round to the start's codes, float32."""
        scales, minima = self._scaling()
        codes = self._start.qweight.float().unflatten(1, (scales.shape[1], -1)) - self._start.zero
        exact = divided(weight.unflatten(1, (scales.shape[1], -1)) + minima, scales)
        return (exact.clamp(codes - INSIDE, codes + INSIDE) * scales - minima).flatten(1)
