"""4-bit codes that are places in a table of 16 numbers, with one scale per 64 columns.

NF4 is such a table: numbers that a normal distribution takes equally often (QLoRA, arXiv:2305.14314, section 3 and
appendix E), up to the largest magnitude of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.scheme import Scheme, register
from compress.checkpoint.weights.base import (
    StoredTensors,
    Weight,
    cast_exactly,
    dequantize_by_rows,
    scale_problems,
)
from compress.checkpoint.weights.grouped_floats import GroupedFloats
from compress.checkpoint.weights.mxfp4 import pack_pairs, unpack_pairs
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.float_scales import RangeSearch
    from compress.checkpoint.weights.grouped_floats import MakeWeight

GROUP_SIZE = 64
NF4 = "4-bit normal float"
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The number of each code, as appendix E of the paper has them."""
FRACTIONS = (1.0, *(1 + 0.02 * step for step in (*range(-1, -16, -1), 1, 2)))
"""Parts of the largest magnitude that are tried as scales."""


class TableFloats(GroupedFloats):
    """`W ~ code_values[qweight] * scales`."""

    __slots__ = ()
    suffixes = (".weight_packed", ".weight_scale")
    mark = ".weight_scale"
    bits = 4
    group_size = GROUP_SIZE
    code_values: ClassVar[tuple[float, ...]]

    @property
    def note(self) -> str:
        return f"{self} is read by this runtime only; others read `compress export --format dense`"

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * (in_features * self.bits + self.num_groups(in_features) * scale_bits)

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return out_features * (in_features + self.num_groups(in_features) * scale_bytes)

    def search(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> tuple[RangeSearch, MakeWeight]:
        import torch

        from compress.checkpoint.float_scales import Codebook, RangeSearch

        found = RangeSearch(Codebook(self.code_values), scale_dtype or torch.bfloat16, FRACTIONS)
        return found, lambda codes, scales: TableFloatWeight(codes, scales, self)

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, groups = stored[".weight_scale"].shape
        return rows, groups * GROUP_SIZE

    def read(self, stored: StoredTensors) -> TableFloatWeight:
        return read_table(stored, self)


@register("nf4")
@dataclass(frozen=True, slots=True)
class Nf4(TableFloats):
    """NF4 as QLoRA defines it, scales in 16 bits."""

    word = "nf4"
    structure = "the nf4 layout"
    numbers = NF4
    code_values = NF4_VALUES


def read_table(stored: StoredTensors, scheme: Scheme) -> TableFloatWeight:
    """Reads bytes of two codes and their scales. Raises CheckpointError for other dtypes."""
    import torch

    packed, scales = (stored[suffix] for suffix in scheme.suffixes)
    if packed.dtype != torch.uint8 or not scales.dtype.is_floating_point or packed.dim() != 2:
        raise CheckpointError(
            f"{stored.module} should hold bytes of codes and scales of a float dtype, not {packed.dtype} "
            f"{list(packed.shape)} and {scales.dtype}"
        )
    return TableFloatWeight(unpack_pairs(packed), scales, scheme)


@dataclass(frozen=True, slots=True)
class TableFloatWeight(Weight):
    """`W [O, I] ~ code_values[qweight] * scales`, scales repeated over each group of columns.

    Attributes:
        qweight: uint8 `[O, I]`, codes below 16.
        scales: any float dtype, `[O, G]`.
        scheme: one with `code_values`.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    scales: Tensor
    scheme: Scheme

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        expected = rows, self.scheme.num_groups(columns)
        if tuple(self.scales.shape) != expected:
            raise SchemeError(f"scales {tuple(self.scales.shape)} must be {expected} for {self.scheme}")

    @property
    def steps(self) -> Tensor:
        """Float32 `[O, G]`: what the numbers of codes are multiplied by."""
        return self.scales.float()

    def factors(self) -> tuple[Tensor, Tensor]:
        """The scales `[O, G]` as they are stored, times one of each row `[O]`, float32: ones."""
        import torch

        return self.scales, torch.ones(len(self.scales), device=self.scales.device)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`: products in float32, as other loaders compute them, then rounded to `dtype`."""
        import torch

        values = torch.tensor(self.scheme.code_values, device=self.qweight.device)

        def panel(codes: Tensor, steps: Tensor) -> Tensor:
            return (values[codes.int()].unflatten(1, (steps.shape[1], -1)) * steps.unsqueeze(-1)).flatten(1)

        return dequantize_by_rows(dtype, panel, self.qweight, self.steps)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        scales = cast_exactly(self.scales, dtype).contiguous()
        return {".weight_packed": pack_pairs(self.qweight), ".weight_scale": scales}

    def problems(self, module: str) -> Iterator[str]:
        yield from scale_problems(module, self.scales)
