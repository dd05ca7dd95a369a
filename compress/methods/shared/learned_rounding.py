"""SignRound: how each weight is rounded, and each group's range, learned by signed gradient descent.

Cheng et al. 2023, https://arxiv.org/abs/2309.05516, section 3: `codes = clamp(round(w / s + v) + z)` with an offset v
in [-0.5, 0.5] for every weight and factors for both ends of every range; both move by the sign of their gradient, by
steps that shrink linearly to nothing, and the best state seen is kept. Rounding passes gradients straight through.

Three things differ from the paper. The start is another method's codes instead of rounding to nearest in the full
range; its ranges are good already, and take shorter steps than offsets do. The best state is chosen by the error on a
fixed set instead of that of the step's own sample. And scales are rounded to the dtype they are stored in before any
code is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.scale_search import storable
from compress.checkpoint.weights.gguf_blocks import BlockIntegers
from compress.checkpoint.weights.integer import IntegerWeight

LARGEST_OFFSET = 0.5
# How far a range factor moves for every step of an offset.
RANGE_SHARE = 0.1
# How often the error is taken to find the best state.
NUM_CHECKS = 10
# A start's codes are kept from tipping over by rounding errors of `latent / scale`.
INSIDE = 0.49


class Learning(Protocol):
    """A weight while its rounding is learned."""

    def codes(self) -> IntegerWeight | BlockIntegers:
        """Return the rounded weight; its values are `values()`."""
        ...

    def values(self) -> Tensor:
        """Return `[O, I]` float32, differentiable in what is learned."""
        ...

    def descend(self, rate: float) -> None:
        """Moves everything against the sign of its gradient, which is then cleared: offsets by `rate`."""
        ...

    def state(self) -> Any:
        """Return a copy of what is learned."""
        ...

    def restore(self, state: Any) -> None:
        """Goes back to a state."""
        ...


class LearnedRounding:
    """One weight `[O, I]` while its rounding is learned.

    Args:
        weight: `[O, I]`, the target.
        start: where to begin; with no step taken, `codes()` is equal to it.

    Attributes:
        offset: `[O, I]` float32, added before rounding, in steps of the grid.
        stretch: `[E, O, G]` float32, factors of the range's ends: one for both when symmetric, else (lower, upper).
    """

    def __init__(self, weight: Tensor, start: IntegerWeight) -> None:
        start = start.to(weight.device)
        self._start = start
        self._latent = _within_codes(weight, start)
        self.offset = torch.zeros_like(self._latent, requires_grad=True)
        ends = 1 if start.scheme.symmetric else 2
        self.stretch = torch.ones(ends, *start.scales.shape, device=weight.device, requires_grad=True)

    def values(self) -> Tensor:
        """Return `[O, I]` float32, differentiable in `offset` and `stretch`."""
        scale, zero = self._scales()
        return _Rounded.apply(self._latent, self.offset, scale, zero, self._start.scheme.max_code)

    @torch.no_grad()
    def codes(self) -> IntegerWeight:
        """Return the rounded weight; its values are `values()`."""
        scale, zero = self._scales()
        codes, _, _ = _round(self._latent, self.offset, scale, zero, self._start.scheme.max_code)
        stored = scale.to(self._start.scales.dtype), zero.to(torch.uint8)
        return IntegerWeight(codes.to(torch.uint8).flatten(1), *stored, self._start.scheme)

    @torch.no_grad()
    def descend(self, rate: float) -> None:
        """Moves everything against the sign of its gradient, which is then cleared: offsets by `rate`."""
        for tensor, step in ((self.offset, rate), (self.stretch, rate * RANGE_SHARE)):
            if tensor.grad is not None:
                tensor.sub_(tensor.grad.sign_(), alpha=step)
                tensor.grad = None
        self.offset.clamp_(-LARGEST_OFFSET, LARGEST_OFFSET)

    def state(self) -> tuple[Tensor, Tensor]:
        """Return a copy of the learned parameters."""
        return self.offset.detach().clone(), self.stretch.detach().clone()

    @torch.no_grad()
    def restore(self, state: tuple[Tensor, Tensor]) -> None:
        """Goes back to a state."""
        self.offset.copy_(state[0])
        self.stretch.copy_(state[1])

    def _scales(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point `[O, G]` as float32, as they are stored; both differentiable in `stretch`."""
        scheme, before, zero = self._start.scheme, self._start.scales.float(), self._start.zero_points.float()
        if scheme.symmetric:
            scale = before * self.stretch[0]
        else:
            wider = (zero * self.stretch[0] + (scheme.max_code - zero) * self.stretch[1]) / scheme.max_code
            moved = zero * self.stretch[0] / wider
            scale = before * wider
            zero = straight_through(moved, lambda exact: exact.round().clamp(0, scheme.max_code))
        return straight_through(scale, lambda exact: storable(exact, self._start.scales.dtype)), zero


@dataclass(frozen=True, slots=True)
class Learned:
    """The outcome of learning.

    Attributes:
        step: after which the best state was seen; 0 when nothing was better than the start.
        loss_before, loss_after: error at the start, and of the best state.
    """

    step: int
    loss_before: float
    loss_after: float


def learn(
    weights: Sequence[Learning],
    backward: Callable[[int], None],
    judge: Callable[[], float],
    steps: int,
    rate: float,
    tick: Callable[[int], None] = lambda _: None,
) -> Learned:
    """Takes `steps` steps and leaves the weights in the best state seen, which may be the start.

    Args:
        weights: the weights that are learned together.
        backward: given the number of a step, adds the gradients of its loss to the weights' tensors.
        judge: the error that decides which state is best.
        rate: of the first step; it falls linearly to zero.
        tick: told the number of steps taken.
    """
    before = best = judge()
    best_step, best_states = 0, [weight.state() for weight in weights]
    checks = {round(steps * (number + 1) / NUM_CHECKS) for number in range(NUM_CHECKS)}
    for step in range(steps):
        tick(step)
        backward(step)
        for weight in weights:
            weight.descend(rate * (1 - step / steps))
        if step + 1 in checks and (loss := judge()) < best:
            best, best_step, best_states = loss, step + 1, [weight.state() for weight in weights]
    for weight, state in zip(weights, best_states, strict=True):
        weight.restore(state)
    return Learned(best_step, before, best)


class _Rounded(torch.autograd.Function):
    """Rounding to a grid, with straight-through gradients: those of clamping alone."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, offset: Tensor, scale: Tensor, zero: Tensor, max_code: int) -> Tensor:
        codes, exact, inside = _round(latent, offset, scale, zero, max_code)
        centered = codes.sub_(zero.unsqueeze(-1))
        ctx.save_for_backward(centered, exact, inside, scale)
        return (centered * scale.unsqueeze(-1)).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        centered, exact, inside, scale = ctx.saved_tensors
        gradient = gradients[0].view(centered.shape)
        free = gradient * inside
        offset = (free * scale.unsqueeze(-1)).flatten(1)
        # value = (codes - zero) * scale; a free code follows latent / scale, so that only its rounding error is left.
        stretched = (gradient * centered).sum(-1).sub_((free * exact).sum(-1))
        # A free code moves with the zero point; a clamped one stays, and its value falls as the zero point rises.
        shifted = (free - gradient).sum(-1).mul_(scale)
        return None, offset, stretched, shifted, None


def _round(latent: Tensor, offset: Tensor, scale: Tensor, zero: Tensor, max_code: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes as float32, `latent / scale`, and where the codes are not clamped: all `[O, G, g]`."""
    groups = scale.shape[1]
    exact = latent.unflatten(1, (groups, -1)) / scale.unsqueeze(-1)
    codes = (exact + offset.unflatten(1, (groups, -1))).round_().add_(zero.unsqueeze(-1))
    inside = (codes >= 0) & (codes <= max_code)
    return codes.clamp_(0, max_code), exact, inside


def straight_through(exact: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `rounding(exact)` exactly, with the gradient of `exact`."""
    return _Replaced.apply(exact, rounding(exact.detach()))


class _Replaced(torch.autograd.Function):
    """Other values with the gradient of the first: adding their difference would not give them to the last bit."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _within_codes(weight: Tensor, start: IntegerWeight) -> Tensor:
    """Return the values nearest to `weight [O, I]` that round to the start's codes, float32."""
    scale, zero = start.scales.float().unsqueeze(-1), start.zero_points.float().unsqueeze(-1)
    codes = start.qweight.float().unflatten(1, (start.scales.shape[1], -1))
    exact = weight.float().unflatten(1, (start.scales.shape[1], -1)) / scale + zero
    return ((torch.maximum(torch.minimum(exact, codes + INSIDE), codes - INSIDE) - zero) * scale).flatten(1)
