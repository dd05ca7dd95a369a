"""A weight of 8-bit floats: e4m3, with 4 bits of exponent and 3 of mantissa, and one scale per output channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.integer import PANEL_ELEMENTS
from compress.common.device import divide
from compress.common.errors import SchemeError

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
"""The largest number; there is no infinity."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """`W [O, I] ~ codes * scale`.

    Attributes:
        codes: float8_e4m3fn `[O, I]`, in the original column order; no NaN.
        scale: `[O, 1]` in the dtype that is stored (bfloat16, float16 or float32).
        scheme: with `fp8`.

    Raises:
        SchemeError: shapes or dtypes that contradict the scheme.
    """

    codes: Tensor
    scale: Tensor
    scheme: Scheme

    def __post_init__(self) -> None:
        if not self.scheme.fp8 or self.codes.dtype != FP8:
            raise SchemeError(f"codes of {self.scheme} cannot be {self.codes.dtype}")
        if tuple(self.scale.shape) != (self.codes.shape[0], 1):
            raise SchemeError(f"scale {tuple(self.scale.shape)} must be {(self.codes.shape[0], 1)} for {self.scheme}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight `[O, I]`, exact products rounded once."""
        exact = torch.float64 if dtype == torch.float64 or self.scale.dtype == torch.float32 else torch.float32
        values = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        rows = max(1, PANEL_ELEMENTS // max(1, self.shape[1]))
        for codes, scale, out in zip(*(each.split(rows) for each in (self.codes, self.scale, values)), strict=True):
            out.copy_(codes.to(exact) * scale.to(exact))
        return values

    def changed(self, change: Callable[[Tensor], Tensor]) -> Fp8Weight:
        """The same with each tensor changed: moved, or some of its rows."""
        return Fp8Weight(change(self.codes), change(self.scale), self.scheme)

    def cpu(self) -> Fp8Weight:
        """The same in host memory."""
        return self.changed(Tensor.cpu)


MAX_LEVEL = 127


def quantize_tokens(x: Tensor, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Levels `[M, I]`, whole numbers from -127 to 127, and scales `[M, 1]`, with `x ~ levels * scale`.

    Both are float32 (float64 for float64 input). A token's result never depends on its neighbours in the batch.
    A row of zeros gets scale 0 and levels 0; a row that is not finite keeps a scale that is not finite.

    Args:
        fp8: levels are 8-bit floats (e4m3) from -448 to 448 instead, each the nearest one.
    """
    exact = x.double() if x.dtype == torch.float64 else x.float()
    scale = divide(exact.abs().amax(-1, keepdim=True), MAX_FP8 if fp8 else MAX_LEVEL)
    levels = exact / scale.clamp_min(torch.finfo(exact.dtype).tiny)
    return (levels.to(FP8).to(exact.dtype) if fp8 else levels.round_()), scale


def round_tokens(x: Tensor, fp8: bool = False) -> Tensor:
    """`x [M, I]` as a product with 8-bit activations sees it, in its own dtype."""
    levels, scale = quantize_tokens(x, fp8)
    return (levels * scale).to(x.dtype)
