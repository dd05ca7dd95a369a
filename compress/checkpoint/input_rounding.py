"""Rounding of inputs as other tools describe it, in place: what a product with quantized activations sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.float_scales import E2M1, E4M3, Numbers
from compress.checkpoint.scale_search import FP8, MAX_FP8, round_integers, round_tokens
from compress.checkpoint.scheme import POWERS, Activations
from compress.checkpoint.weights.base import StoredTensors
from compress.common.errors import CheckpointError

ZERO_POINT, FACTOR = ".input_zero_point", ".input_global_scale"


@dataclass(frozen=True, slots=True)
class Integers(Numbers):
    """Signed integers of some bits."""

    bits: int

    @property
    def least(self) -> int:
        """The least integer."""
        return -(1 << self.bits - 1)

    @property
    def largest(self) -> float:  # type: ignore[override]
        """Half of the range, which compressed-tensors scales the largest input to; the largest integer is less."""
        return ((1 << self.bits) - 1) / 2

    def nearest(self, x: Tensor) -> Tensor:
        return round_integers(x, self.bits)

    def codes(self, numbers: Tensor) -> Tensor:
        return numbers.to(torch.int8).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class InputRounding:
    """Rounding of inputs with its stored numbers.

    Attributes:
        scale: float32 `[1]`, the stored scale of all tokens, or what scales in e4m3 are divided by.
        zero: float32 `[1]`, the stored zero point.
    """

    kind: Activations
    scale: Tensor | None = None
    zero: Tensor | None = None

    @classmethod
    def read(cls, kind: Activations, stored: StoredTensors) -> InputRounding:
        """Reads the stored numbers of a module. Raises CheckpointError where they are missing or not one number, or
        for rounding that is not computed here."""
        if kind.scales == "other":
            raise CheckpointError(f"inputs of {stored.module} are {kind}, not computed here", "Use --activations 16bit")
        if not kind.stored:
            return cls(kind)
        scale, zero = stored[kind.stored].flatten().float(), stored.optional(ZERO_POINT)
        if len(scale) != 1 or not bool(scale > 0):
            raise CheckpointError(f"{stored.module}{kind.stored} should be one positive number, not {scale.tolist()}")
        is_quotient = kind.scales == "e4m3" and kind.stored != FACTOR
        return cls(kind, scale.reciprocal() if is_quotient else scale, None if zero is None else zero.flatten().float())

    def __call__(self, x: Tensor) -> Tensor:
        """Rounds `x [M, I]`, in its own dtype."""
        if self.kind in (Activations.INT8, Activations.FP8):
            return round_tokens(x, self.kind)
        exact, inputs = x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1]
        size = self.kind.group_size or inputs
        groups = functional.pad(exact, (0, -inputs % size)).unflatten(-1, (-1, size))
        step, zero = self._grid(groups)
        # Where all inputs of a group are 0, so is its scale.
        numbers = self._numbers.nearest(groups / step.clamp_min(torch.finfo(exact.dtype).tiny) + zero)
        return ((numbers - zero) * step).to(x.dtype).flatten(-2)[..., :inputs]

    def to(self, device: torch.device) -> InputRounding:
        """Returns the same on a device."""
        moved = (None if part is None else part.to(device) for part in (self.scale, self.zero))
        return InputRounding(self.kind, *moved)

    def equals(self, other: InputRounding | None) -> bool:
        """Returns whether both round alike."""
        return other is not None and (self.kind, *self._stored) == (other.kind, *other._stored)

    @property
    def _stored(self) -> tuple[list[float], ...]:
        return tuple([] if part is None else part.tolist() for part in (self.scale, self.zero))

    @property
    def _numbers(self) -> Numbers:
        if self.kind.numbers == "int":
            return Integers(self.kind.bits)
        return E4M3() if self.kind.bits == 8 else E2M1()

    def _grid(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scales and zero points, `[M, G, 1]` or `[1]`, of inputs `[M, G, g]`."""
        none = groups.new_zeros(1)
        if self.scale is not None and self.kind.scales == "float":
            return self.scale.to(groups.dtype), none if self.zero is None else self.zero.to(groups.dtype)
        if self.kind.symmetric:
            return self._scales(groups.abs().amax(-1, keepdim=True)), none
        least, most = groups.amin(-1, keepdim=True).clamp_max_(0), groups.amax(-1, keepdim=True).clamp_min_(0)
        integers = Integers(self.kind.bits)
        scales = (most - least) / (2 * integers.largest)
        return scales, (integers.least - least / scales.clamp_min(torch.finfo(scales.dtype).tiny)).round_()

    def _scales(self, largest: Tensor) -> Tensor:
        """Returns scales of groups whose largest magnitudes are `largest [M, G, 1]`."""
        spanning = largest / self._numbers.largest
        if self.kind.scales in POWERS:
            return self._powers(largest, spanning)
        if self.scale is None:
            return spanning
        return (spanning * self.scale).clamp_max_(MAX_FP8).to(FP8).to(largest.dtype) / self.scale

    def _powers(self, largest: Tensor, spanning: Tensor) -> Tensor:
        """Returns powers of two; see `POWERS`."""
        mantissas, exponents = torch.frexp(spanning if self.kind.scales == "e8m0 ceil" else largest)
        if self.kind.scales == "e8m0 ceil":
            return torch.ldexp(torch.ones_like(largest), exponents - (mantissas == 0.5).int())
        exponents = exponents + (mantissas >= 0.875).int() if self.kind.scales == "e8m0" else exponents
        last = torch.frexp(torch.tensor(self._numbers.largest)).exponent.to(exponents.device)
        return torch.ldexp(torch.ones_like(largest), exponents - last)
