"""N:M sparse weights: zeros are not stored, other values are, as integers or in the model's dtype, with their index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from compress.checkpoint.scheme import Scheme, WrappingScheme, register
from compress.checkpoint.weights.base import (
    StoredTensors,
    Weight,
    dequantized,
    digest,
    part_problems,
    row_scales,
)
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.integer import Int
from compress.checkpoint.weights.packing import num_words, pack_bits, unpack_bits
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class NMSparsity:
    """N:M pattern: of every `m` neighbouring inputs of a row at most `n` are not zero, and only those are stored,
    each with its index among the `m`."""

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        if not (self.m in (4, 8) and 1 <= self.n < self.m):
            raise SchemeError(f"sparsity pattern {self} is not supported", "Use 2:4, 4:8 or another N:4 or N:8")

    @classmethod
    def parse(cls, text: str) -> NMSparsity:
        """`2:4` and the like. Raises SchemeError for anything else."""
        n, colon, m = text.partition(":")
        if not (colon and n.isdigit() and m.isdigit()):
            raise SchemeError(f"{text!r} is not a sparsity pattern", "Use 2:4 or 4:8")
        return cls(int(n), int(m))

    @property
    def index_bits(self) -> int:
        """Bits of the index of a stored value."""
        return (self.m - 1).bit_length()

    def num_stored(self, in_features: int) -> int:
        """Stored values of a row."""
        return in_features // self.m * self.n

    def to_dict(self) -> dict[str, int]:
        """Plain values, as recorded recipes hold them."""
        return {"kept": self.n, "of": self.m}

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


@register("sparsity")
@dataclass(frozen=True, slots=True)
class NM(WrappingScheme):
    """Values of `inner` in an N:M pattern.

    Attributes:
        pattern: which values are zero.
    """

    pattern: NMSparsity

    suffixes = (*Int.suffixes, ".weight_values", ".weight_indices")
    mark = ".weight_indices"
    title = "N:M sparsity"
    structure = "the omitted zeros"
    note = (
        "zeros of an N:M pattern are left out, which only this runtime reads; others read `compress export --format "
        "dense`, or --format compressed-tensors where the weights are integers"
    )

    def __post_init__(self) -> None:
        WrappingScheme.__post_init__(self)
        if self.group_size is not None and self.group_size % self.pattern.m:
            raise SchemeError(
                f"groups of {self.group_size} cut through the {self.pattern} pattern", "Use --group-size 128"
            )
        if self.activations:
            raise SchemeError(
                f"{self.pattern} sparsity with 8-bit activations is not supported", "Use 16-bit activations"
            )

    @property
    def sparsity(self) -> NMSparsity:
        return self.pattern

    @property
    def column_multiple(self) -> int:
        return self.group_size or self.pattern.m

    @property
    def numbers(self) -> str:
        return self.inner.numbers if self.inner else ""

    @property
    def expanded(self) -> Scheme:
        return self.inner or self

    def check(self, shape: tuple[int, int]) -> None:
        if shape[1] % self.pattern.m:
            raise SchemeError(
                f"the {self.pattern} pattern does not divide {shape[1]} input features",
                "Leave the layer out (--ignore)",
            )
        self.num_groups(shape[1])

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        stored = self.pattern.num_stored(in_features)
        bits = out_features * stored * (self.bits + self.pattern.index_bits)
        if self.inner is None:
            return bits
        return (
            bits
            + self.inner.stored_bits(out_features, in_features, scale_bits)
            - out_features * in_features * (self.bits)
        )

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        if self.inner is None:
            return out_features * in_features * scale_bytes
        return self.inner.unpacked_bytes(out_features, in_features, scale_bytes)

    def __str__(self) -> str:
        return f"{WrappingScheme.__str__(self)} {self.pattern}"

    @property
    def entry(self) -> str:
        return str(self.pattern)

    @classmethod
    def parse_entry(cls, entry: Any) -> NMSparsity:
        return NMSparsity.parse(entry)

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        if self.inner:
            return self.inner.shape(stored)
        rows, kept = stored[".weight_values"].shape
        return rows, kept // self.pattern.n * self.pattern.m

    def read(self, stored: StoredTensors) -> SparseWeight:
        import torch

        rows, columns = self.shape(stored)
        indices = _read_indices(stored, self.pattern, rows, columns)
        if self.inner is None:
            kept = stored[".weight_values"]
            return SparseWeight(torch.zeros(rows, columns, dtype=kept.dtype).scatter_(1, indices, kept), self)
        groups = self.num_groups(columns)
        zeros = self.inner.read_zeros(stored, rows, groups)
        kept = unpack_bits(stored[".weight_packed"], self.bits, indices.shape[1], 1)
        empty = self.inner.weight(
            kept.new_zeros(rows, columns), row_scales(stored[".weight_scale"], rows, groups), zeros
        )
        codes = empty.zero_points.repeat_interleave(columns // groups, 1).scatter_(1, indices, kept)
        return SparseWeight(replace(empty, qweight=codes), self)

    def wrap(self, values: Weight | Tensor) -> SparseWeight:
        if isinstance(values, Weight) and not isinstance(values.scheme, Int):
            raise SchemeError(f"{values.scheme} does not go with N:M sparsity", "Use integers there")
        return SparseWeight(cast("CodedWeight | Tensor", values), self)


@dataclass(frozen=True, slots=True)
class SparseWeight(Weight):
    """`W [O, I]` with zeros in the pattern of its scheme.

    Attributes:
        values: `[O, I]`, zeros in place: integers of `scheme.inner`, or floats in the model's dtype.

    Raises:
        SchemeError: values of another kind than the scheme's.
    """

    values: CodedWeight | Tensor
    scheme: NM

    def __post_init__(self) -> None:
        found = self.values.scheme if isinstance(self.values, Weight) else None
        if not isinstance(self.scheme, NM) or found != self.scheme.inner:
            raise SchemeError(f"values of {found or 'the dtype of the model'} are not stored as {self.scheme}")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        import torch

        return dequantized(self.values, dtype or torch.float32)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        import torch

        pattern = self.scheme.pattern
        indices = kept_indices(self.is_kept(), pattern)
        packed = pack_bits((indices % pattern.m).to(torch.uint8), pattern.index_bits, 1)
        if not isinstance(self.values, Weight):
            kept = self.values.to(dtype).gather(1, indices).contiguous()
            return {".weight_values": kept, ".weight_indices": packed}
        codes = self.values.qweight.gather(1, indices)
        return cast(Int, self.scheme.inner).packed(self.values, codes, dtype) | {".weight_indices": packed}

    def is_kept(self) -> Tensor:
        """Bool `[O, I]`: values that are not zero."""
        if not isinstance(self.values, Weight):
            return self.values != 0
        zero = self.values.zero_points
        return self.values.qweight != zero.repeat_interleave(self.shape[1] // zero.shape[1], 1)

    def expanded(self) -> CodedWeight | Tensor:
        return self.values

    def stored_as(self, scheme: Scheme) -> Weight:
        if scheme == self.scheme or not isinstance(self.values, Weight):
            return Weight.stored_as(self, scheme)
        return self.values.stored_as(scheme)

    def problems(self, module: str) -> Iterator[str]:
        yield from part_problems(module, self.values)
        pattern = self.scheme.pattern
        nonzero = self.dequantize().view(self.shape[0], -1, pattern.m) != 0
        if crowded := int((nonzero.sum(-1) > pattern.n).sum()):
            yield f"{module} has {crowded} groups with more than {pattern} values"

    def digest(self) -> str:
        return digest(self.values)


def kept_indices(nonzero: Tensor, pattern: NMSparsity) -> Tensor:
    """Columns `[O, I / of * kept]`, rising within each row, of the values that are stored: all that are not zero, and
    where a group has fewer, the first of its zeros.

    Args:
        nonzero: bool `[O, I]`.

    Raises:
        SchemeError: a group has more values than the pattern keeps.
    """
    import torch

    rows, columns = nonzero.shape
    grouped = nonzero.view(rows, columns // pattern.m, pattern.m)
    crowded = int((grouped.sum(-1) > pattern.n).sum())
    if crowded:
        raise SchemeError(f"{crowded} groups hold more values than {pattern} keeps", "Prune the layer")
    indices = (~grouped).to(torch.uint8).argsort(dim=-1, stable=True)[..., : pattern.n].sort(-1).values
    starts = torch.arange(0, columns, pattern.m).view(1, -1, 1)
    return (indices + starts).view(rows, -1)


def _read_indices(stored: StoredTensors, pattern: NMSparsity, rows: int, columns: int) -> Tensor:
    import torch

    words, count = stored[".weight_indices"], pattern.num_stored(columns)
    if tuple(words.shape) != (rows, num_words(count, pattern.index_bits)):
        raise CheckpointError(
            f"{stored.module}.weight_indices is {list(words.shape)}, but {rows} x {count} indices of {pattern} pack to "
            f"{[rows, num_words(count, pattern.index_bits)]}"
        )
    inside = unpack_bits(words, pattern.index_bits, count, 1).view(rows, -1, pattern.n).long()
    if bool((inside.diff(dim=-1) <= 0).any()):
        raise CheckpointError(f"{stored.module}.weight_indices has indices that do not rise within their group")
    starts = torch.arange(0, columns, pattern.m).view(1, -1, 1)
    return (inside + starts).view(rows, count)
