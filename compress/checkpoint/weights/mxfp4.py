"""4-bit floats (e2m1) with one power of two per 32 columns: MXFP4 of the OCP microscaling formats, version 1.0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.checkpoint.scheme import register
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows
from compress.checkpoint.weights.grouped_floats import GroupedFloats
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.float_scales import GroupSearch
    from compress.checkpoint.weights.grouped_floats import MakeWeight

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code."""
FP4 = "4-bit float"
"""Kind of codes of `VALUES`, whatever their scales are."""
GROUP_SIZE = 32
EXPONENT_BIAS, NAN_EXPONENT = 127, 255
EXPONENT_STEPS = (0, -1, -2, 1)
"""Exponents that are tried, from the one that clips nothing on; the standard takes that one or the one below."""


@register("mxfp4")
@dataclass(frozen=True, slots=True)
class Mxfp4(GroupedFloats):
    """`W ~ VALUES[qweight] * 2 ** (exponents - 127)`."""

    suffixes = (".weight_packed", ".weight_scale")
    mark = ".weight_scale"
    word = "mxfp4"
    bits = 4
    group_size = GROUP_SIZE
    numbers = FP4
    code_values = VALUES

    def search(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> tuple[GroupSearch, MakeWeight]:
        from compress.checkpoint.float_scales import E2M1, GroupSearch, powers_of_two

        return GroupSearch(E2M1(), powers_of_two(), EXPONENT_STEPS), lambda codes, places: Mxfp4Weight(
            codes, places, self
        )

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, groups = stored[".weight_scale"].shape
        return rows, groups * GROUP_SIZE

    def read(self, stored: StoredTensors) -> Mxfp4Weight:
        """Reads bytes of two codes, `[O, I / 2]` or `[O, G, 16]`, the first one in the low half."""
        import torch

        packed, exponents = stored[".weight_packed"].flatten(1), stored[".weight_scale"]
        if (packed.dtype, exponents.dtype) != (torch.uint8, torch.uint8):
            raise CheckpointError(
                f"{stored.module} should hold bytes of codes and exponents, not {packed.dtype} and {exponents.dtype}"
            )
        return Mxfp4Weight(unpack_pairs(packed), exponents, self)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(Weight):
    """`W [O, I] ~ VALUES[qweight] * 2 ** (exponents - 127)`, exponents repeated over each group of columns.

    Attributes:
        qweight: uint8 `[O, I]`, codes below 16.
        exponents: uint8 `[O, I / 32]`; 255 would be NaN.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    exponents: Tensor
    scheme: Mxfp4

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        expected = rows, self.scheme.num_groups(columns)
        if tuple(self.exponents.shape) != expected:
            raise SchemeError(f"exponents {tuple(self.exponents.shape)} must be {expected} for {self.scheme}")

    @property
    def steps(self) -> Tensor:
        """Float32 `[O, I / 32]`: what the numbers of codes are multiplied by."""
        import torch

        return torch.ldexp(
            torch.ones(self.exponents.shape, device=self.exponents.device), self.exponents.int() - EXPONENT_BIAS
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """The steps as scales `[O, G]` of at most 1, times one of each row `[O]`; float32. In float16 scales below
        2^-24 vanish: of groups that are so much smaller than the row's largest."""
        import torch

        powers = self.exponents.int() - EXPONENT_BIAS
        largest = powers.amax(1)
        ones = torch.ones(powers.shape, device=powers.device)
        return torch.ldexp(ones, powers - largest.unsqueeze(1)), torch.ldexp(ones[:, 0], largest)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`, which 16-bit floats hold exactly unless they leave their range."""
        import torch

        values = torch.tensor(VALUES, device=self.qweight.device)

        def panel(codes: Tensor, exponents: Tensor) -> Tensor:
            numbers = values[codes.int()].unflatten(1, (-1, GROUP_SIZE))
            return torch.ldexp(numbers, exponents.int().unsqueeze(-1) - EXPONENT_BIAS).flatten(1)

        return dequantize_by_rows(dtype, panel, self.qweight, self.exponents)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {".weight_packed": pack_pairs(self.qweight), ".weight_scale": self.exponents.contiguous()}

    def problems(self, module: str) -> Iterator[str]:
        if bad := int((self.exponents == NAN_EXPONENT).sum()):
            yield f"{module} has {bad} exponents that are NaN"


def pack_pairs(codes: Tensor) -> Tensor:
    """Bytes `[O, I / 2]` of codes `[O, I]` below 16, the first of two in the low half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()


def unpack_pairs(packed: Tensor) -> Tensor:
    """The inverse of `pack_pairs`."""
    import torch

    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
