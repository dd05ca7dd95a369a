"""8-bit floats (e4m3) with one float32 scale per block of rows and columns, as DeepSeek and Qwen publish them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import Scheme, register
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows, scale_problems
from compress.checkpoint.weights.fp8 import check_codes
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE_BITS = 32


@register("fp8_block")
@dataclass(frozen=True, slots=True)
class BlockFp8(Scheme):
    """`W ~ qweight * scales`, one scale per block; the last blocks of rows and of columns may be smaller.

    Attributes:
        block: rows and columns that share a scale.
    """

    block: tuple[int, int] = (128, 128)

    suffixes = (".weight", ".weight_scale")
    mark = ".weight_scale"
    bits = 8
    numbers = "blocked float"
    structure = ""
    note = ""

    def __post_init__(self) -> None:
        if len(self.block) != 2 or min(self.block) < 1:
            raise SchemeError(f"blocks of {list(self.block)} are not rows and columns", "Use [128, 128]")

    def num_groups(self, in_features: int) -> int:
        return -(-in_features // self.block[1])

    def num_scales(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape of the stored scales."""
        return -(-out_features // self.block[0]), self.num_groups(in_features)

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        rows, columns = self.num_scales(out_features, in_features)
        return out_features * in_features * self.bits + rows * columns * SCALE_BITS

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return out_features * (in_features + self.num_groups(in_features) * SCALE_BITS // 8)

    def __str__(self) -> str:
        return f"w{self.bits}a16 fp8 blocks {self.block[0]}x{self.block[1]}"

    def fields(self) -> dict[str, Any]:
        return {"bits": self.bits, self.key: list(self.block)}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> BlockFp8:
        rows, columns = fields[cls.key]
        return cls((int(rows), int(columns)))

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, columns = stored[".weight"].shape
        return rows, columns

    def read(self, stored: StoredTensors) -> BlockFp8Weight:
        codes = stored[".weight"]
        check_codes(stored.module, codes)
        return BlockFp8Weight.of(codes, stored[".weight_scale"], self)


@dataclass(frozen=True, slots=True)
class BlockFp8Weight(Weight):
    """`W [O, I] ~ qweight * scales`, with scales repeated over the columns of each block.

    Attributes:
        qweight: float8_e4m3fn `[O, I]`; no NaN.
        scales: float32 `[O, G]`, those of a block in each of its rows.
    """

    qweight: Tensor
    scales: Tensor
    scheme: BlockFp8

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, scheme: BlockFp8) -> BlockFp8Weight:
        """Makes the weight from one scale per block, of any floating point dtype. Raises SchemeError."""
        rows, columns = codes.shape
        expected = scheme.num_scales(rows, columns)
        if tuple(scales.shape) != expected:
            raise SchemeError(f"scales {tuple(scales.shape)} must be {expected} for {scheme} of {rows} x {columns}")
        return cls(codes, scales.float().repeat_interleave(scheme.block[0], 0)[:rows].contiguous(), scheme)

    @property
    def block_scales(self) -> Tensor:
        """One scale per block, float32."""
        return self.scales[:: self.scheme.block[0]].contiguous()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`: products in float32, as other loaders compute them, then rounded to `dtype`."""
        import torch

        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def panel(codes: Tensor, scales: Tensor) -> Tensor:
            repeated = scales.to(wide).repeat_interleave(self.scheme.block[1], 1)
            return codes.to(wide) * repeated[:, : codes.shape[1]]

        return dequantize_by_rows(dtype, panel, self.qweight, self.scales)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {".weight": self.qweight, ".weight_scale": self.block_scales}

    def problems(self, module: str) -> Iterator[str]:
        return scale_problems(module, self.scales)
