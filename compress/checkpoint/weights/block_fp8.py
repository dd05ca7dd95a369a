"""8-bit floats (e4m3) with one float32 scale per block of rows and columns, as DeepSeek and Qwen publish them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import Scheme, register
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows, scale_problems
from compress.checkpoint.weights.fp8 import STEPS, check_codes
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.grids import FloatGrid

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
    has_grid = True
    word = "fp8-block"
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
        for name, value in {"bits": 8, "group_size": None, "symmetric": True, "activation_bits": None}.items():
            if fields.get(name, value) != value:
                problem = f"blocks of 8-bit floats have no {name}={fields[name]}"
                raise SchemeError(problem, f"Leave {name} out beside {cls.word}")
        rows, columns = fields[cls.key]
        return cls((int(rows), int(columns)))

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, columns = stored[".weight"].shape
        return rows, columns

    def read(self, stored: StoredTensors) -> BlockFp8Weight:
        codes = stored[".weight"]
        check_codes(stored.module, codes)
        return BlockFp8Weight.of(codes, stored[".weight_scale"], self)

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> BlockFp8Weight:
        return self.grid(weight, importance, scale_dtype).encode(weight)

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
        return self._grid(weight, None, (1.0,), scale_dtype).encode(weight).dequantize()

    def grid(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> FloatGrid[BlockFp8Weight]:
        if inputs is not None and importance is None:
            importance = inputs.float().square().mean(0)
        return self._grid(weight, importance, STEPS, scale_dtype)

    def _grid(
        self, weight: Tensor, importance: Tensor | None, steps: Sequence[float], scale_dtype: torch.dtype | None
    ) -> FloatGrid[BlockFp8Weight]:
        import torch

        from compress.checkpoint.float_scales import E4M3
        from compress.checkpoint.grids import FloatGrid
        from compress.checkpoint.scale_search import FP8
        from compress.common.device import require_finite

        require_finite(weight, "the weight")
        rows, columns = self.block
        # Of the model's dtype, though stored in float32: transformers reads them so.
        dtype = scale_dtype or torch.bfloat16
        parts = [_best_scales(each.float(), columns, importance, steps, dtype) for each in weight.split(rows)]
        scales = torch.stack(parts).repeat_interleave(rows, 0)[: len(weight)].contiguous()
        return FloatGrid(E4M3(), scales, columns, lambda codes: BlockFp8Weight(codes.view(FP8), scales, self))


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


def _best_scales(
    weight: Tensor, columns: int, importance: Tensor | None, steps: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Float32 `[G]`, values of `dtype`, for the blocks in some rows `[R, I]`: the scales of least squared error among
    `steps` times the ones that span each block; columns are weighted by `importance [I]`."""
    import torch

    from compress.checkpoint.float_scales import E4M3
    from compress.checkpoint.scale_search import storable

    numbers, padding = E4M3(), (0, -weight.shape[1] % columns)
    blocks = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, columns))
    counts = torch.ones_like(weight[0]) if importance is None else importance.to(weight)
    weights = torch.nn.functional.pad(counts, padding).view(-1, columns)
    full = blocks.abs().amax((0, 2)) / numbers.largest
    best, least = storable(full, dtype), torch.full_like(full, torch.inf)
    for step in steps:
        scale = storable(full * step, dtype)
        repeated = scale.unsqueeze(-1)
        error = (numbers.nearest(blocks / repeated) * repeated - blocks).square().mul_(weights).sum((0, 2))
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best
