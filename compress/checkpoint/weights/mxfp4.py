"""4-bit floats (e2m1) with one power of two per 32 columns: MXFP4 of the OCP microscaling formats, version 1.0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import Scheme, register
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code."""
GROUP_SIZE = 32
EXPONENT_BITS, EXPONENT_BIAS, NAN_EXPONENT = 8, 127, 255


@register("mxfp4")
@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    """`W ~ VALUES[qweight] * 2 ** (exponents - 127)`."""

    suffixes = (".weight_packed", ".weight_scale")
    mark = ".weight_scale"
    is_exact_size = True
    bits = 4
    group_size = GROUP_SIZE
    numbers = "microscaled float"
    structure = ""
    note = ""

    def num_groups(self, in_features: int) -> int:
        if in_features % GROUP_SIZE:
            raise SchemeError(f"mxfp4 groups of {GROUP_SIZE} do not divide {in_features} input features")
        return in_features // GROUP_SIZE

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * (in_features * self.bits + self.num_groups(in_features) * EXPONENT_BITS)

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return out_features * (in_features + self.num_groups(in_features))

    def __str__(self) -> str:
        return f"w{self.bits}a16 mxfp4 g{GROUP_SIZE}"

    def fields(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": GROUP_SIZE, self.key: True}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Mxfp4:
        if (fields.get("bits", 4), fields.get("group_size", GROUP_SIZE)) != (4, GROUP_SIZE):
            raise SchemeError(f"mxfp4 has 4 bits and groups of {GROUP_SIZE}", "Leave bits and group size out beside it")
        return cls()

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
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        return Mxfp4Weight(codes, exponents, self)


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

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`, which 16-bit floats hold exactly unless they leave their range."""
        import torch

        values = torch.tensor(VALUES, device=self.qweight.device)

        def panel(codes: Tensor, exponents: Tensor) -> Tensor:
            numbers = values[codes.int()].unflatten(1, (-1, GROUP_SIZE))
            return torch.ldexp(numbers, exponents.int().unsqueeze(-1) - EXPONENT_BIAS).flatten(1)

        return dequantize_by_rows(dtype, panel, self.qweight, self.exponents)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        packed = self.qweight[:, 0::2] | self.qweight[:, 1::2] << 4
        return {".weight_packed": packed.contiguous(), ".weight_scale": self.exponents.contiguous()}

    def problems(self, module: str) -> Iterator[str]:
        if bad := int((self.exponents == NAN_EXPONENT).sum()):
            yield f"{module} has {bad} exponents that are NaN"
