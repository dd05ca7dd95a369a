"""The integer form of a quantized weight: the truth every method returns and every exporter starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.errors import SchemeError
from compress.checkpoint.scheme import Scheme

PANEL_ELEMENTS = 2**22
"""Weights whose exact values are in memory at one time while a whole matrix is dequantized."""


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """`W [O, I] ~ (codes - zero) * scale`, with zero and scale repeated over each group of columns.

    Attributes:
        codes: uint8 `[O, I]`, each in `[0, scheme.max_code]`, in the original column order.
        scale: `[O, G]` in the dtype that is stored (bfloat16, float16 or float32); may be negative.
        zero: uint8 `[O, G]`; `scheme.midpoint` everywhere when symmetric.
        scheme: bits, group size and symmetry.

    Raises:
        SchemeError: shapes, dtypes or zero points that contradict the scheme.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    scheme: Scheme

    def __post_init__(self) -> None:
        expected = (self.codes.shape[0], self.scheme.num_groups(self.codes.shape[1]))
        if self.codes.dtype != torch.uint8 or self.zero.dtype != torch.uint8:
            raise SchemeError(f"codes and zero points must be uint8, not {self.codes.dtype} and {self.zero.dtype}")
        if tuple(self.scale.shape) != expected or tuple(self.zero.shape) != expected:
            shapes = f"scale {tuple(self.scale.shape)} and zero {tuple(self.zero.shape)}"
            raise SchemeError(f"{shapes} must be {expected} for {self.scheme}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight `[O, I]`. The product is exact in float32 and rounded once, so 16-bit results are the correctly
        rounded ones that other loaders also compute."""
        exact = torch.float64 if dtype == torch.float64 or self.scale.dtype == torch.float32 else torch.float32
        values = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        rows = max(1, PANEL_ELEMENTS // max(1, self.shape[1]))
        parts = zip(*(each.split(rows) for each in (self.codes, self.zero, self.scale, values)), strict=True)
        for codes, zero, scale, out in parts:
            offsets = codes.unflatten(1, (scale.shape[1], -1)).to(exact) - zero.to(exact).unsqueeze(-1)
            out.copy_((offsets * scale.to(exact).unsqueeze(-1)).flatten(1))
        return values

    def changed(self, change: Callable[[Tensor], Tensor]) -> IntegerWeight:
        """The same with each tensor changed: moved, or some of its rows."""
        return IntegerWeight(change(self.codes), change(self.scale), change(self.zero), self.scheme)

    def cpu(self) -> IntegerWeight:
        """The same in host memory."""
        return self.changed(Tensor.cpu)
