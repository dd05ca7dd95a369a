"""8-bit floats (e4m3) with one power of two per 32 columns: MXFP8 of the OCP microscaling formats, version 1.0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.checkpoint.scheme import register
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows
from compress.checkpoint.weights.fp8 import check_codes
from compress.checkpoint.weights.grouped_floats import GroupedFloats
from compress.checkpoint.weights.mxfp4 import EXPONENT_BIAS, GROUP_SIZE, NAN_EXPONENT
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.float_scales import GroupSearch
    from compress.checkpoint.weights.grouped_floats import MakeWeight

EXPONENT_STEPS = (0, -1, 1)
"""Exponents that are tried, from the one that clips nothing on."""


@register("mxfp8")
@dataclass(frozen=True, slots=True)
class Mxfp8(GroupedFloats):
    """`W ~ qweight * 2 ** (exponents - 127)`."""

    suffixes = (".weight", ".weight_scale")
    mark = ".weight_scale"
    word = "mxfp8"
    bits = 8
    group_size = GROUP_SIZE
    numbers = "8-bit microscaled float"

    def search(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> tuple[GroupSearch, MakeWeight]:
        from compress.checkpoint.float_scales import E4M3, GroupSearch, powers_of_two
        from compress.checkpoint.scale_search import FP8

        found = GroupSearch(E4M3(), powers_of_two(), EXPONENT_STEPS)
        return found, lambda codes, places: Mxfp8Weight(codes.view(FP8), places, self)

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, columns = stored[".weight"].shape
        return rows, columns

    def read(self, stored: StoredTensors) -> Mxfp8Weight:
        import torch

        codes, exponents = stored[".weight"], stored[".weight_scale"]
        check_codes(stored.module, codes)
        if exponents.dtype != torch.uint8:
            raise CheckpointError(f"{stored.module} should hold bytes of exponents, not {exponents.dtype}")
        return Mxfp8Weight(codes, exponents, self)


@dataclass(frozen=True, slots=True)
class Mxfp8Weight(Weight):
    """`W [O, I] ~ qweight * 2 ** (exponents - 127)`, exponents repeated over each group of columns.

    Attributes:
        qweight: float8_e4m3fn `[O, I]`; no NaN.
        exponents: uint8 `[O, I / 32]`; 255 would be NaN.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    exponents: Tensor
    scheme: Mxfp8

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        expected = rows, self.scheme.num_groups(columns)
        if tuple(self.exponents.shape) != expected:
            raise SchemeError(f"exponents {tuple(self.exponents.shape)} must be {expected} for {self.scheme}")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`, which 16-bit floats hold exactly unless they leave their range."""
        import torch

        def panel(codes: Tensor, exponents: Tensor) -> Tensor:
            grouped = codes.float().unflatten(1, (-1, GROUP_SIZE))
            return torch.ldexp(grouped, exponents.int().unsqueeze(-1) - EXPONENT_BIAS).flatten(1)

        return dequantize_by_rows(dtype, panel, self.qweight, self.exponents)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {".weight": self.qweight.contiguous(), ".weight_scale": self.exponents.contiguous()}

    def problems(self, module: str) -> Iterator[str]:
        if bad := int((self.exponents == NAN_EXPONENT).sum()):
            yield f"{module} has {bad} exponents that are NaN"
