"""4-bit floats (e2m1) with an 8-bit float (e4m3) per 16 columns and one float32 number for the matrix: NVFP4.

As `compressed-tensors` and NVIDIA's ModelOpt store it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from compress.checkpoint.scheme import register
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows, scale_problems
from compress.checkpoint.weights.grouped_floats import GroupedFloats
from compress.checkpoint.weights.mxfp4 import FP4, VALUES, pack_pairs, unpack_pairs
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.float_scales import GroupSearch
    from compress.checkpoint.weights.grouped_floats import MakeWeight

GROUP_SIZE = 16
DIVISOR_BITS = 32
DIVISOR = 2048.0
"""Number that stored scales are divided by wherever that fits a matrix. Engines that fuse projections want one number
for all of them, and a power of two leaves the values of scales exact in 16 bits."""
FITTING = 2.0**-7, 6 * 448 / DIVISOR
"""Largest magnitudes of matrices whose scales have all their bits with that divisor, of groups 1/100 as large too."""
SCALE_STEPS = (0, *(sign * step for step in range(1, 7) for sign in (-1, 1)))
"""Neighbours that are tried of the 8-bit float that clips nothing: from about half to twice of it."""


@register("nvfp4")
@dataclass(frozen=True, slots=True)
class Nvfp4(GroupedFloats):
    """`W ~ VALUES[qweight] * scales / divisor`."""

    suffixes = (".weight_packed", ".weight_scale", ".weight_global_scale")
    mark = ".weight_scale"
    word = "nvfp4"
    bits = 4
    group_size = GROUP_SIZE
    numbers = FP4
    code_values = VALUES

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return GroupedFloats.stored_bits(self, out_features, in_features, scale_bits) + DIVISOR_BITS

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        groups = self.num_groups(in_features)
        return out_features * (in_features + groups + DIVISOR_BITS // 8)

    def search(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> tuple[GroupSearch, MakeWeight]:
        import torch

        from compress.checkpoint.float_scales import E2M1, GroupSearch, positive_floats
        from compress.checkpoint.scale_search import FP8

        divisor = divisor_of(float(weight.abs().max()))

        def make(codes: Tensor, places: Tensor) -> Nvfp4Weight:
            divisors = torch.full((len(codes), 1), divisor, device=codes.device)
            return Nvfp4Weight(codes, places.view(FP8), divisors, self)

        return GroupSearch(E2M1(), positive_floats() / divisor, SCALE_STEPS, first=1), make

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, groups = stored[".weight_scale"].shape
        return rows, groups * GROUP_SIZE

    def read(self, stored: StoredTensors) -> Nvfp4Weight:
        import torch

        packed, scales, divisor = (stored[suffix] for suffix in self.suffixes)
        kinds = packed.dtype, scales.dtype, divisor.dtype, divisor.numel()
        if kinds != (torch.uint8, torch.float8_e4m3fn, torch.float32, 1):
            raise CheckpointError(
                f"{stored.module} should hold bytes of codes, 8-bit float scales and one float32 number, not "
                f"{packed.dtype}, {scales.dtype} and {divisor.numel()} of {divisor.dtype}"
            )
        return Nvfp4Weight(unpack_pairs(packed), scales, divisor.reshape(1, 1).repeat(len(packed), 1), self)


@dataclass(frozen=True, slots=True)
class Nvfp4Weight(Weight):
    """`W [O, I] ~ VALUES[qweight] * (scales / divisors)`, scales repeated over each group of columns.

    Attributes:
        qweight: uint8 `[O, I]`, codes below 16.
        scales: float8_e4m3fn `[O, I / 16]`.
        divisors: float32 `[O, 1]`, the stored global scale in each row.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    scales: Tensor
    divisors: Tensor
    scheme: Nvfp4

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        expected = rows, self.scheme.num_groups(columns)
        if tuple(self.scales.shape) != expected or tuple(self.divisors.shape) != (rows, 1):
            shapes = f"scales {tuple(self.scales.shape)} and divisors {tuple(self.divisors.shape)}"
            raise SchemeError(f"{shapes} must be {expected} and {(rows, 1)} for {self.scheme}")

    @property
    def steps(self) -> Tensor:
        """Float32 `[O, I / 16]`: what the numbers of codes are multiplied by."""
        return self.scales.float() / self.divisors

    def factors(self) -> tuple[Tensor, Tensor]:
        """The steps as scales `[O, G]` that 16-bit floats hold, times one of each row `[O]`; float32."""
        return self.scales.float(), self.divisors[:, 0].reciprocal()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`: products in float32, as other loaders compute them, then rounded to `dtype`."""
        import torch

        values = torch.tensor(VALUES, device=self.qweight.device)

        def panel(codes: Tensor, steps: Tensor) -> Tensor:
            return (values[codes.int()].unflatten(1, (-1, GROUP_SIZE)) * steps.unsqueeze(-1)).flatten(1)

        return dequantize_by_rows(dtype, panel, self.qweight, self.steps)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        if bool((self.divisors != self.divisors[0]).any()):
            raise SchemeError("rows with several global scales are not one nvfp4 weight", "Store them one by one")
        return {
            ".weight_packed": pack_pairs(self.qweight),
            ".weight_scale": self.scales.contiguous(),
            ".weight_global_scale": self.divisors[0].clone(),
        }

    def fuse(self, others: Sequence[Weight]) -> Self | None:
        """As one weight with one global scale; None when they differ in it."""
        divisors = [each.divisors[:1] for each in (self, *others) if isinstance(each, Nvfp4Weight)]
        if any(float(each) != float(divisors[0]) for each in divisors):
            return None
        return Weight.fuse(self, others)

    def problems(self, module: str) -> Iterator[str]:
        yield from scale_problems(module, self.steps)


def divisor_of(largest: float) -> float:
    """The global scale of a matrix whose largest magnitude is given: a power of two."""
    if FITTING[0] <= largest <= FITTING[1] or not 0 < largest < math.inf:
        return DIVISOR
    return 2.0 ** max(-126, min(126, math.floor(math.log2(6 * 448 / largest))))
