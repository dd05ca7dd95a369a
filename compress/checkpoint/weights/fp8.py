"""8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa) with one scale per output channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import Activations, Scheme, register
from compress.checkpoint.weights.base import (
    PANEL_ELEMENTS,
    StoredTensors,
    Weight,
    cast_exactly,
    dequantize_by_rows,
    digest_of,
    row_scales,
    scale_problems,
)
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


STEPS = tuple(2 ** (step / 8) for step in range(8))
"""Factors of the scale that spans a row, which are tried for the least error."""


@register("fp8")
@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """`W ~ qweight * scales`, one scale per row and no zero points.

    Attributes:
        activations: rounding of the inputs to such floats; None for 16-bit inputs.
    """

    activations: Activations | None = None

    suffixes = (".weight", ".weight_scale")
    mark = ".weight_scale"
    word = "fp8"
    bits = 8
    numbers = "float"
    structure = ""
    note = ""

    @classmethod
    def target(cls) -> Fp8:
        return cls(Activations.FP8)

    def __post_init__(self) -> None:
        if self.activations not in (None, Activations.FP8):
            raise SchemeError(f"8-bit floats with {self.activations} activations are not supported", "Use fp8 for both")

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * (in_features * self.bits + scale_bits)

    def __str__(self) -> str:
        return f"w{self.bits}a{self.activation_bits or 16} fp8 channel"

    def fields(self) -> dict[str, Any]:
        return {"bits": self.bits, "activation_bits": self.activation_bits, "fp8": True}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Fp8:
        if (fields.get("bits", 8), fields.get("group_size"), fields.get("symmetric", True)) != (8, None, True):
            raise SchemeError(
                "8-bit floats have 8 bits, one scale per output channel and no zero points",
                "Leave bits, group size and asymmetry out beside fp8",
            )
        return cls(Activations.from_bits(fields.get("activation_bits"), Activations.FP8))

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, columns = stored[".weight"].shape
        return rows, columns

    def read(self, stored: StoredTensors) -> Fp8Weight:
        codes, scale = stored[".weight"], stored[".weight_scale"]
        check_codes(stored.module, codes)
        return Fp8Weight(codes, row_scales(scale, codes.shape[0], 1), self)

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> Fp8Weight:
        import torch

        from compress.common.device import require_finite

        require_finite(weight, "the weight")
        rows, dtype = max(1, PANEL_ELEMENTS // weight.shape[1]), scale_dtype or torch.bfloat16
        scale = torch.cat([_best_scale(part.float(), importance, dtype) for part in weight.split(rows)])
        codes = torch.cat([_codes(*parts) for parts in zip(weight.split(rows), scale.split(rows), strict=True)])
        return Fp8Weight(codes, scale.to(dtype), self)

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
        import torch

        scale = _full_scale(weight.float(), scale_dtype or torch.bfloat16)
        return _codes(weight, scale).float() * scale


@dataclass(frozen=True, slots=True)
class Fp8Weight(Weight):
    """`W [O, I] ~ qweight * scales`.

    Attributes:
        qweight: float8_e4m3fn `[O, I]`, in the original column order; no NaN.
        scales: `[O, 1]` in the dtype that is stored (bfloat16, float16 or float32).

    Raises:
        SchemeError: shapes or dtypes that contradict the scheme.
    """

    qweight: Tensor
    scales: Tensor
    scheme: Fp8

    def __post_init__(self) -> None:
        import torch

        if not isinstance(self.scheme, Fp8) or self.qweight.dtype != torch.float8_e4m3fn:
            raise SchemeError(f"codes of {self.scheme} cannot be {self.qweight.dtype}")
        if tuple(self.scales.shape) != (self.qweight.shape[0], 1):
            raise SchemeError(
                f"scale {tuple(self.scales.shape)} must be {(self.qweight.shape[0], 1)} for {self.scheme}"
            )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`: products in float32, as other loaders compute them, then rounded to `dtype`."""
        import torch

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return dequantize_by_rows(
            dtype, lambda codes, scale: codes.to(wide) * scale.to(wide), self.qweight, self.scales
        )

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {".weight": self.qweight, ".weight_scale": cast_exactly(self.scales, dtype)}

    def problems(self, module: str) -> Iterator[str]:
        return scale_problems(module, self.scales)

    def digest(self) -> str:
        import torch

        return digest_of(f"fp8 {self.shape}", self.qweight, self.scales.to(torch.float64))


def check_codes(module: str, codes: Tensor) -> None:
    """Raises CheckpointError unless the codes of a module are finite 8-bit floats."""
    import torch

    if codes.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"{module}.weight should hold 8-bit floats (e4m3), but is {codes.dtype}")
    if bad := int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum()):
        raise CheckpointError(f"{module}.weight holds {bad} NaN codes", "Quantize it again")


def _best_scale(weight: Tensor, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[O, 1]`, float32 with values of `dtype`."""
    import torch

    from compress.checkpoint.scale_search import storable

    full = _full_scale(weight, dtype)
    best, least = full, torch.full_like(full, torch.inf)
    for step in STEPS:
        scale = storable(full * step, dtype)
        squares = (_codes(weight, scale).float() * scale - weight).square_()
        error = (squares if importance is None else squares.mul_(importance)).sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _full_scale(weight: Tensor, dtype: torch.dtype) -> Tensor:
    from compress.checkpoint.scale_search import MAX_FP8, storable

    return storable(weight.abs().amax(1, keepdim=True) / MAX_FP8, dtype)


def _codes(weight: Tensor, scale: Tensor) -> Tensor:
    from compress.checkpoint.scale_search import FP8, MAX_FP8

    return (weight.float() / scale).clamp_(-MAX_FP8, MAX_FP8).to(FP8)
