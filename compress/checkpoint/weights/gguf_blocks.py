"""Forms whose stored tensors are the blocks of a GGUF file, and what these forms share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from compress.checkpoint.scheme import FixedScheme
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.grids import Grid

SUFFIX = ".weight_blocks"
INTEGERS = "block-scaled integer"
"""Kind of codes that are integers under scales and minima of blocks."""


class BlockScheme(FixedScheme):
    """A type of GGUF files.

    Attributes:
        block_size: columns of a block.
        block_bytes: of a block.
        has_minima: whether groups have a minimum beside their scale.
    """

    __slots__ = ()
    block_size: ClassVar[int]
    block_bytes: ClassVar[int]
    has_minima: ClassVar[bool] = False
    suffixes = (SUFFIX,)
    mark = SUFFIX
    is_exact_size = True
    has_grid = True
    structure = "the blocks"

    @property
    def note(self) -> str:
        return f"{self} is read by this runtime; `compress export --format gguf` writes the same blocks for llama.cpp"

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def num_blocks(self, in_features: int) -> int:
        """Blocks of a row. Raises SchemeError when they do not divide it."""
        if in_features % self.block_size:
            raise SchemeError(
                f"{self.word} blocks of {self.block_size} do not divide {in_features} input features",
                "Leave the layer out with --ignore",
            )
        return in_features // self.block_size

    def num_groups(self, in_features: int) -> int:
        return self.num_blocks(in_features) * (self.block_size // self.group_size)

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * self.num_blocks(in_features) * self.block_bytes * 8

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        steps = self.num_groups(in_features) if self.block_size > self.group_size else 0
        scales = (steps + 2 * self.num_blocks(in_features)) * (2 if self.has_minima else 1)
        return out_features * (in_features + scales)

    def __str__(self) -> str:
        return f"w{self.bits}a16 {self.word}"

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, row_bytes = stored[SUFFIX].shape
        return rows, row_bytes // self.block_bytes * self.block_size

    def read(self, stored: StoredTensors) -> BlockWeight:
        blocks = stored[SUFFIX]
        if str(blocks.dtype) != "torch.uint8" or blocks.dim() != 2 or blocks.shape[1] % self.block_bytes:
            raise CheckpointError(
                f"{stored.module} should hold rows of blocks of {self.block_bytes} bytes, not {blocks.dtype} "
                f"{list(blocks.shape)}"
            )
        return self.from_blocks(blocks)

    @abstractmethod
    def from_blocks(self, blocks: Tensor) -> BlockWeight:
        """The weight of GGUF blocks, uint8 `[O, bytes of a row]`."""

    @abstractmethod
    def search(self, weight: Tensor, importance: Tensor | None) -> Grid[BlockWeight]:
        """The grid of the scales and minima of least squared error, weighted by `importance`, for `weight [O, I]`."""

    def grid(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> Grid[BlockWeight]:
        self.num_blocks(weight.shape[1])
        return self.search(weight, importance)

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> BlockWeight:
        return self.grid(weight, importance, scale_dtype).encode(weight)


class BlockWeight(Weight):
    """A weight `[O, I]` that is stored as blocks."""

    __slots__ = ()
    scheme: BlockScheme

    @abstractmethod
    def blocks(self) -> Tensor:
        """The blocks of a GGUF file, uint8 `[O, bytes of a row]`."""

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {SUFFIX: self.blocks()}


class BlockIntegers(BlockWeight):
    """Integers times scales of groups, minus minima where the type has them; else codes are centred on the midpoint.

    Attributes:
        qweight: uint8 `[O, I]`.
    """

    __slots__ = ()
    qweight: Tensor

    @property
    @abstractmethod
    def scales(self) -> Tensor:
        """Float32 `[O, G]`."""

    @property
    @abstractmethod
    def minima(self) -> Tensor | None:
        """Float32 `[O, G]`, subtracted from the multiples of scales; None for a type without them."""

    @abstractmethod
    def with_codes(self, codes: Tensor) -> Self:
        """The same scales and minima with other codes `[O, I]`, uint8."""

    @property
    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """The float16 numbers from which scales and minima follow."""

    @abstractmethod
    def with_factors(self, for_scales: Tensor, for_minima: Tensor) -> Self:
        """The same codes with other `factors`, of any float dtype."""

    @property
    def zero(self) -> int:
        """The code of zero, before minima."""
        return 0 if self.scheme.has_minima else 1 << (self.scheme.bits - 1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`: computed in float32 as llama.cpp does, then rounded to `dtype`."""

        def panel(codes: Tensor, scales: Tensor, *minima: Tensor) -> Tensor:
            grouped = (codes.float() - self.zero).unflatten(1, (scales.shape[1], -1)).mul_(scales.unsqueeze(-1))
            return (grouped - minima[0].unsqueeze(-1) if minima else grouped).flatten(1)

        minima = self.minima
        return dequantize_by_rows(dtype, panel, self.qweight, self.scales, *(() if minima is None else (minima,)))
