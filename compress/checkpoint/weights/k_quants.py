"""K types of GGUF: integers in groups of 16 or 32, whose scales and minima are integers times a float16 of 256 columns.

Weights are stored as the very blocks of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from compress.checkpoint.scheme import Scheme, register
from compress.checkpoint.weights.base import StoredTensors, Weight, dequantize_by_rows, scale_problems
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.gguf.types.k import KBlocks, KLayout
    from compress.checkpoint.grids import KGrid

SUPER_BLOCK = 256
"""Columns that share the float16 of their scales, and that of their minima."""
SUFFIX = ".weight_blocks"
INTEGERS = "super-block integer"
"""Kind of codes whose scales are integers times a number of each super-block."""


class KQuant(Scheme):
    """A K type.

    Attributes:
        block_bytes: of a super-block.
        has_minima: whether groups have a minimum; without them codes are integers around `midpoint`.
    """

    __slots__ = ()
    group_size: ClassVar[int]
    block_bytes: ClassVar[int]
    has_minima: ClassVar[bool]
    suffixes = (SUFFIX,)
    mark = SUFFIX
    is_exact_size = True
    has_grid = True
    numbers = INTEGERS
    structure = "the super-blocks"

    @property
    def note(self) -> str:
        return f"{self} is read by this runtime; `compress export --format gguf` writes the same blocks for llama.cpp"

    @property
    def holds_zeros(self) -> bool:
        return not self.has_minima

    @property
    def midpoint(self) -> int:
        """The code of zero of types without minima."""
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def layout(self) -> KLayout:
        """The bytes of the blocks."""
        from compress.checkpoint.gguf.types.k import LAYOUTS

        return LAYOUTS[self.word]

    def num_groups(self, in_features: int) -> int:
        if in_features % SUPER_BLOCK:
            raise SchemeError(
                f"{self.word} super-blocks of {SUPER_BLOCK} do not divide {in_features} input features",
                "Leave the layer out with --ignore",
            )
        return in_features // self.group_size

    def num_blocks(self, in_features: int) -> int:
        """Super-blocks of a row. Raises SchemeError when they do not divide it."""
        return self.num_groups(in_features) * self.group_size // SUPER_BLOCK

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * self.num_blocks(in_features) * self.block_bytes * 8

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        scales = self.num_groups(in_features) + 2 * self.num_blocks(in_features)
        return out_features * (in_features + scales * (2 if self.has_minima else 1))

    def __str__(self) -> str:
        return f"w{self.bits}a16 {self.word}"

    def fields(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size, self.key: True}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        scheme = cls()
        known = {"bits": scheme.bits, "group_size": scheme.group_size, "symmetric": True, "activation_bits": None}
        for name, value in known.items():
            if fields.get(name, value) != value:
                problem = f"{cls.word} has {scheme.bits} bits, groups of {scheme.group_size} and 16-bit activations"
                raise SchemeError(f"{problem}, not {name}={fields[name]}", f"Leave {name} out beside it")
        return scheme

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, row_bytes = stored[SUFFIX].shape
        return rows, row_bytes // self.block_bytes * SUPER_BLOCK

    def read(self, stored: StoredTensors) -> KQuantWeight:
        blocks = stored[SUFFIX]
        if str(blocks.dtype) != "torch.uint8" or blocks.dim() != 2 or blocks.shape[1] % self.block_bytes:
            raise CheckpointError(
                f"{stored.module} should hold rows of blocks of {self.block_bytes} bytes, not {blocks.dtype} "
                f"{list(blocks.shape)}"
            )
        return self.from_blocks(blocks)

    def from_blocks(self, blocks: Tensor) -> KQuantWeight:
        """The weight of GGUF blocks, uint8 `[O, bytes of a row]`."""
        return self.of(self.layout.split(blocks.reshape(-1, self.block_bytes)), len(blocks))

    def of(self, parts: KBlocks, rows: int) -> KQuantWeight:
        """The weight `[rows, I]` of super-blocks in the order of its rows."""

        def by_row(part: Tensor) -> Tensor:
            return part.reshape(rows, len(part) // rows * part.shape[1])

        scale_codes, min_codes = by_row(parts.scale_codes), by_row(parts.min_codes)
        super_scales, super_minima = by_row(parts.super_scales), by_row(parts.super_minima)
        return KQuantWeight(by_row(parts.codes), scale_codes, min_codes, super_scales, super_minima, self)

    def grid(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> KGrid:
        from compress.checkpoint.grids import KGrid

        self.num_groups(weight.shape[1])
        return KGrid.search(weight, self, importance)

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> KQuantWeight:
        return self.grid(weight, importance, scale_dtype).start


@register("q2_k")
@dataclass(frozen=True, slots=True)
class Q2K(KQuant):
    """2 bits in groups of 16, with scales and minima of 4 bits."""

    word = "q2_k"
    bits = 2
    group_size = 16
    block_bytes = 84
    has_minima = True


@register("q3_k")
@dataclass(frozen=True, slots=True)
class Q3K(KQuant):
    """3 bits in groups of 16, with scales of 6 bits."""

    word = "q3_k"
    bits = 3
    group_size = 16
    block_bytes = 110
    has_minima = False


@register("q4_k")
@dataclass(frozen=True, slots=True)
class Q4K(KQuant):
    """4 bits in groups of 32, with scales and minima of 6 bits."""

    word = "q4_k"
    bits = 4
    group_size = 32
    block_bytes = 144
    has_minima = True


@register("q5_k")
@dataclass(frozen=True, slots=True)
class Q5K(KQuant):
    """5 bits in groups of 32, with scales and minima of 6 bits."""

    word = "q5_k"
    bits = 5
    group_size = 32
    block_bytes = 176
    has_minima = True


@register("q6_k")
@dataclass(frozen=True, slots=True)
class Q6K(KQuant):
    """6 bits in groups of 16, with scales of 8 bits."""

    word = "q6_k"
    bits = 6
    group_size = 16
    block_bytes = 210
    has_minima = False


@dataclass(frozen=True, slots=True)
class KQuantWeight(Weight):
    """`W [O, I] ~ qweight * scales - minima`, without minima `(qweight - midpoint) * scales`.

    Scales and minima are repeated over each group of columns; types without minima have parts of no columns for them.

    Attributes:
        qweight: uint8 `[O, I]`.
        scale_codes: int8 `[O, G]`.
        min_codes: int8 `[O, G]` or `[O, 0]`.
        super_scales: float16 `[O, I / 256]`, of which scales are multiples by `scale_codes`.
        super_minima: float16 `[O, I / 256]` or `[O, 0]`.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    scale_codes: Tensor
    min_codes: Tensor
    super_scales: Tensor
    super_minima: Tensor
    scheme: KQuant

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        groups, blocks = self.scheme.num_groups(columns), self.scheme.num_blocks(columns)
        sizes = (groups, groups, blocks, blocks) if self.scheme.has_minima else (groups, 0, blocks, 0)
        found, expected = [tuple(part.shape) for part in self._scaling], [(rows, size) for size in sizes]
        if found != expected:
            raise SchemeError(f"scales and minima {found} must be {expected} for {self.scheme}")

    @property
    def _scaling(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.scale_codes, self.min_codes, self.super_scales, self.super_minima

    @property
    def scales(self) -> Tensor:
        """Float32 `[O, G]`."""
        return _products(self.scale_codes, self.super_scales)

    @property
    def minima(self) -> Tensor | None:
        """Float32 `[O, G]`, subtracted from the multiples of scales; None for a type without them."""
        return _products(self.min_codes, self.super_minima) if self.scheme.has_minima else None

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`: computed in float32 as llama.cpp does, then rounded to `dtype`."""

        def panel(codes: Tensor, scales: Tensor, *minima: Tensor) -> Tensor:
            numbers = codes.float() if minima else codes.float() - self.scheme.midpoint
            grouped = numbers.unflatten(1, (scales.shape[1], -1)).mul_(scales.unsqueeze(-1))
            return (grouped - minima[0].unsqueeze(-1) if minima else grouped).flatten(1)

        minima = self.minima
        return dequantize_by_rows(dtype, panel, self.qweight, self.scales, *(() if minima is None else (minima,)))

    def blocks(self) -> Tensor:
        """The blocks of a GGUF file, uint8 `[O, bytes of a row]`."""
        from compress.checkpoint.gguf.types.k import KBlocks

        rows, columns = self.shape
        count = rows * self.scheme.num_blocks(columns)
        parts = (part.reshape(count, rows * part.shape[1] // max(1, count)) for part in (self.qweight, *self._scaling))
        return self.scheme.layout.join(KBlocks(*parts)).reshape(rows, -1)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {SUFFIX: self.blocks()}

    def problems(self, module: str) -> Iterator[str]:
        yield from scale_problems(module, self.super_scales)
        yield from scale_problems(module, self.super_minima)


def _products(codes: Tensor, numbers: Tensor) -> Tensor:
    """Float32 `[O, G]`: codes `[O, G]` times the number `[O, I / 256]` of their super-block."""
    return (codes.float().unflatten(1, (numbers.shape[1], -1)) * numbers.float().unsqueeze(-1)).flatten(1)
