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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.scale_search import range_kernel, storable
from compress.checkpoint.weights.coded import CodedWeight
from compress.cpu.binding import BEST
from compress.cpu.learned_rounding import learned_step, learned_values

LARGEST_OFFSET = 0.5
# How far a range factor moves for every step of an offset.
RANGE_SHARE = 0.1
# How often the error is taken to find the best state.
NUM_CHECKS = 10
# A start's codes are kept from tipping over by rounding errors of `latent / scale`.
INSIDE = 0.49


class Learning(ABC):
    """A weight `[O, I]` while its rounding is learned. `offset`: `[O, I]` float32, added before rounding, in steps of
    the grid."""

    offset: Tensor

    @property
    @abstractmethod
    def parameters(self) -> tuple[Tensor, ...]:
        """Tensors that are learned."""

    @abstractmethod
    def codes(self) -> CodedWeight:
        """Return the rounded weight; its values are `values()`."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return the dequantized weight `[O, I]` in float32, detached."""

    @abstractmethod
    def descend(self, gradient: Tensor, rate: float) -> None:
        """Step each parameter against the sign of its gradient, offsets by `rate`; `gradient [O, I]`, float32, is that
        of the loss with respect to `values()`."""

    def state(self) -> tuple[Tensor, ...]:
        """Return a copy of the parameters."""
        return tuple(each.detach().clone() for each in self.parameters)

    @torch.no_grad()
    def restore(self, state: tuple[Tensor, ...]) -> None:
        """Goes back to a state."""
        for tensor, saved in zip(self.parameters, state, strict=True):
            tensor.copy_(saved)


class LearnedRounding(Learning):
    """Integers while their rounding is learned.

    Args:
        start: where to begin; with no step taken, `codes()` is equal to it.
        instruction_set: of the compiled code, which works on CPUs; None keeps to torch.

    Attributes:
        stretch: `[E, O, G]` float32, factors of the range's ends: one for both when symmetric, else (lower, upper).
    """

    def __init__(self, weight: Tensor, start: CodedWeight, instruction_set: int | None = BEST) -> None:
        start = start.to(weight.device)
        self._start = start
        self._instruction_set = instruction_set if range_kernel(weight.device) == "C" else None
        self._latent = _within_codes(weight, start)
        self.offset = torch.zeros_like(self._latent)
        ends = 1 if start.scheme.symmetric else 2
        self.stretch = torch.ones(ends, *start.scales.shape, device=weight.device, requires_grad=True)

    @torch.no_grad()
    def values(self) -> Tensor:
        scale, zero = self._scales()
        if self._instruction_set is not None:
            max_code = self._start.scheme.max_code
            return learned_values(self._latent, self.offset, scale, zero, max_code, self._instruction_set)
        return (self._round(scale, zero)[-1] * scale.unsqueeze(-1)).flatten(1)

    @torch.no_grad()
    def codes(self) -> CodedWeight:
        scale, zero = self._scales()
        codes = self._round(scale, zero)[-1] + zero.unsqueeze(-1)
        stored = scale.to(self._start.scales.dtype), zero.to(torch.uint8)
        return self._start.scheme.weight(codes.to(torch.uint8).flatten(1), *stored)

    def descend(self, gradient: Tensor, rate: float) -> None:
        with torch.enable_grad():
            scale, zero = self._scales()
        stretched, shifted = self._step(gradient, scale.detach(), zero.detach(), rate)
        if zero.requires_grad:
            torch.autograd.backward([scale, zero], [stretched, shifted])
        else:
            scale.backward(stretched)
        move(self.stretch, rate * RANGE_SHARE)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.offset, self.stretch

    def _round(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `latent / scale`, where codes are not clamped, and codes less zero points: all `[O, G, g]`."""
        exact = self._latent.unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)
        moved = (exact + self.offset.view(exact.shape)).round_().add_(zero.unsqueeze(-1))
        codes = moved.clamp(0, self._start.scheme.max_code)
        return exact, moved == codes, codes.sub_(zero.unsqueeze(-1))

    @torch.no_grad()
    def _step(self, gradient: Tensor, scale: Tensor, zero: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """Step the offsets; return the gradients of scales and zero points `[O, G]`.

        Rounding passes gradients straight through. `value = (code - zero) * scale`: a code inside the range follows
        `latent / scale`, which leaves its rounding error alone; a clamped one stays, and its value falls as the zero
        point rises.
        """
        if self._instruction_set is not None:
            latent, max_code, best = self._latent, self._start.scheme.max_code, self._instruction_set
            return learned_step(latent, self.offset, scale, zero, max_code, gradient, rate, LARGEST_OFFSET, best)
        exact, inside, codes = self._round(scale, zero)
        gradient = gradient.view(codes.shape)
        free = gradient * inside
        signs = (free * scale.unsqueeze(-1)).sign_().flatten(1)
        self.offset.sub_(signs, alpha=rate).clamp_(-LARGEST_OFFSET, LARGEST_OFFSET)
        stretched = (gradient * codes).sum(-1).sub_((free * exact).sum(-1))
        return stretched, (free - gradient).sum(-1).mul_(scale)

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
    gradients: Callable[[int], Sequence[Tensor | None]],
    judge: Callable[[], float],
    steps: int,
    rate: float,
    tick: Callable[[int], None] = lambda _: None,
) -> Learned:
    """Takes `steps` steps and leaves the weights in the best state seen, which may be the start.

    Args:
        gradients: takes the number of a step; returns the gradient of its loss with respect to the `values()` of each
            weight, None for a weight that the step did not use.
        judge: the error that decides which state is best.
        rate: of the first step; it falls linearly to zero.
    """
    before = best = judge()
    best_step, best_states = 0, [weight.state() for weight in weights]
    checks = {round(steps * (number + 1) / NUM_CHECKS) for number in range(NUM_CHECKS)}
    for step in range(steps):
        tick(step)
        for weight, gradient in zip(weights, gradients(step), strict=True):
            if gradient is not None:
                weight.descend(gradient, rate * (1 - step / steps))
        if step + 1 in checks and (loss := judge()) < best:
            best, best_step, best_states = loss, step + 1, [weight.state() for weight in weights]
    for weight, state in zip(weights, best_states, strict=True):
        weight.restore(state)
    return Learned(best_step, before, best)


def straight_through(exact: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `rounding(exact)` exactly, with the gradient of `exact`."""
    return _Replaced.apply(exact, rounding(exact.detach()))  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def move(parameter: Tensor, step: float) -> None:
    """Step a parameter against the sign of its gradient, and clear the gradient."""
    if parameter.grad is not None:
        parameter.sub_(parameter.grad.sign_(), alpha=step)
        parameter.grad = None


class _Replaced(torch.autograd.Function):
    """Other values with the gradient of the first: adding their difference would not give them to the last bit."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _within_codes(weight: Tensor, start: CodedWeight) -> Tensor:
    """Return the values nearest to `weight [O, I]` that round to the start's codes, float32."""
    scale, zero = start.scales.float().unsqueeze(-1), start.zero_points.float().unsqueeze(-1)
    codes = start.qweight.float().unflatten(1, (start.scales.shape[1], -1))
    exact = weight.float().unflatten(1, (start.scales.shape[1], -1)) / scale + zero
    return ((torch.maximum(torch.minimum(exact, codes + INSIDE), codes - INSIDE) - zero) * scale).flatten(1)
