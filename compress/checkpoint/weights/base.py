"""Weights: tensors of one stored form each, with the operations that every part of the project asks of them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from compress.checkpoint.scheme import Scheme
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Get: TypeAlias = "Callable[[str], Tensor]"
"""Gives a stored tensor by its full name; raises CheckpointError when there is none."""

PANEL_ELEMENTS = 2**18
"""Weights whose exact values are in memory at one time while a whole matrix is dequantized; they fit into a cache."""


class Weight(ABC):
    """A weight `[O, I]` as stored: a frozen data class of its scheme, and of tensors and weights that it wraps.

    The first of these parts has the weight's shape unless a form says otherwise. Every part of a form that fuses has a
    row per output.

    Attributes:
        scheme: how it is stored.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    scheme: Scheme

    def named_parts(self) -> dict[str, Weight | Tensor]:
        """Its fields by name, without the scheme and those that are None."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "scheme"}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def parts(self) -> tuple[Weight | Tensor, ...]:
        """Its fields without the scheme and those that are None."""
        return tuple(self.named_parts().values())

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.parts[0].shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return sum(part.nbytes for part in self.parts)

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`, rounded once to `dtype`; None is float32."""

    @abstractmethod
    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stored tensors by suffix. `dtype` is the model's, in which scales and unquantized values are stored.

        Raises:
            SchemeError: the values cannot be stored exactly, or not in this form.
        """

    def exact_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stored tensors by suffix, with scales in float32 where `dtype` does not hold them exactly."""
        import torch

        try:
            return self.tensors(dtype)
        except SchemeError:
            return self.tensors(torch.float32)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with each tensor changed: moved, or some of its rows."""
        parts = self.named_parts().items()
        changed = {name: part.changed(change) if isinstance(part, Weight) else change(part) for name, part in parts}
        return replace(self, **changed)

    def some_rows(self, rows: Sequence[slice]) -> Self:
        """Concatenates some ranges of its outputs."""
        return self.changed(lambda part: cut_rows(part, rows))

    def some_columns(self, columns: slice) -> Weight:
        """A part of its inputs, which begins and ends at multiples of `scheme.column_multiple`."""
        width, multiple = self.shape[1], self.scheme.column_multiple

        def cut(part: Tensor) -> Tensor:
            count = part.shape[1]
            each = multiple if count == -(-width // multiple) else width // count  # columns that share a number
            return part if count == 1 else part[:, columns.start // each : -(-columns.stop // each)]

        return self.changed(cut)

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return self.changed(lambda tensor: tensor.to(device))

    def expanded(self) -> Weight | Tensor:
        """The same values without structure: codes with zeros in place, or values in the model's dtype."""
        return self

    @property
    def is_symmetric(self) -> bool:
        """Whether every zero point is the midpoint of the codes, whatever the scheme says."""
        return self.scheme.symmetric

    @property
    def outlier_columns(self) -> Tensor | None:
        """Input columns `[k]` that are stored in 16 bits; None when there are none."""
        return None

    def stored_as(self, scheme: Scheme) -> Weight:
        """The same values under another scheme that can hold them. Raises SchemeError for one that cannot."""
        if scheme != self.scheme:
            raise SchemeError(f"{self.scheme} cannot be stored as {scheme}", "Use --format dense")
        return self

    def product(self) -> Weight | Factors | BesideColumns | Turned:
        """Returns the operands of the product: the weight itself, or several in turn."""
        return self

    def fuse(self, others: Sequence[Weight]) -> Self | None:
        """This weight above `others` over the same input, as one; None when they cannot be one weight."""
        if not self.scheme.fuses or any(each.scheme != self.scheme for each in others):
            return None
        parts = [fuse_parts(alike) for alike in zip(self.parts, *(each.parts for each in others), strict=True)]
        fused = dict(zip(self.named_parts(), parts, strict=True))
        return None if any(part is None for part in parts) else replace(self, **fused)

    def problems(self, module: str) -> Iterator[str]:
        """Contradictions in the values as read back, a line each."""
        yield from ()

    def digest(self) -> str:
        """SHA-256 of the stored values, whatever container holds them."""
        import torch

        stored = self.tensors(torch.float64)
        return digest_of(f"{self.scheme.key} {self.shape}", *(stored[name] for name in sorted(stored)))


def fuse_parts(parts: Sequence[Weight | Tensor]) -> Weight | Tensor | None:
    """The first of several parts above the others, as one; None when their dtypes or schemes differ."""
    import torch

    first, weights = parts[0], [part for part in parts if isinstance(part, Weight)]
    if isinstance(first, Weight):
        return first.fuse(weights[1:])
    tensors = [part for part in parts if not isinstance(part, Weight)]
    return torch.cat(tensors) if len({part.dtype for part in tensors}) == 1 else None


@dataclass(frozen=True, slots=True)
class Factors:
    """A product in two steps, `x right^T left^T`: `left [O, r]` and `right [r, I]`."""

    left: Weight | Tensor
    right: Weight | Tensor


@dataclass(frozen=True, slots=True)
class BesideColumns:
    """The sum of a product and of one with a few inputs: `base [O, I]`, and `values [O, k]` of the inputs `columns`."""

    base: Weight
    columns: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Turned:
    """A product with `base [O, I]` of inputs that are multiplied by Hadamard matrices of this order first."""

    base: Weight
    order: int


def digest(weight: Weight | Tensor) -> str:
    """SHA-256 of a weight, or of the dtype, shape and bytes of an unquantized tensor."""
    if isinstance(weight, Weight):
        return weight.digest()
    return digest_of(f"{weight.dtype} {tuple(weight.shape)}", weight)


def dequantized(part: Weight | Tensor, dtype: torch.dtype) -> Tensor:
    """A weight or an unquantized tensor as plain numbers."""
    return part.dequantize(dtype) if isinstance(part, Weight) else part.to(dtype)


def part_problems(name: str, part: Weight | Tensor) -> Iterator[str]:
    """Contradictions in a weight, or NaN and infinity in an unquantized tensor, a line each."""
    return part.problems(name) if isinstance(part, Weight) else nonfinite_problems(name, part)


def cut_rows(part: Tensor, rows: Sequence[slice]) -> Tensor:
    """Concatenates some ranges of the rows of a tensor; a view if there is only one range."""
    import torch

    return part[rows[0]] if len(rows) == 1 else torch.cat([part[each] for each in rows])


def dequantize_by_rows(
    dtype: torch.dtype | None, dequantize: Callable[..., Tensor], codes: Tensor, *parts: Tensor | None
) -> Tensor:
    """Applies `dequantize` to some rows of codes and `parts` at a time, and rounds to `dtype`; None is float32. The
    values are differentiable in `parts`."""
    import torch

    rows = max(1, PANEL_ELEMENTS // max(1, codes.shape[1]))
    panels = zip(*(repeat(None) if each is None else each.split(rows) for each in (codes, *parts)), strict=False)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts):
        return torch.cat([dequantize(*panel).to(dtype or torch.float32) for panel in panels])
    values = torch.empty(codes.shape, dtype=dtype or torch.float32, device=codes.device)
    for out, panel in zip(values.split(rows), panels, strict=True):
        out.copy_(dequantize(*panel))
    return values


def digest_of(kind: str, *parts: Tensor) -> str:
    """SHA-256 of a text and the bytes of tensors."""
    from compress.checkpoint.safetensors import tensor_bytes

    state = hashlib.sha256(kind.encode())
    for part in parts:
        state.update(tensor_bytes(part))
    return state.hexdigest()


def joint_digest(*parts: Weight | Tensor) -> str:
    """SHA-256 of the digests of several parts."""
    return hashlib.sha256(" ".join(map(digest, parts)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of one module, by suffix.

    Attributes:
        module: full name.
    """

    module: str
    get: Get

    def __getitem__(self, suffix: str) -> Tensor:
        """Raises CheckpointError when the tensor is missing."""
        return self.get(self.module + suffix)

    def optional(self, suffix: str) -> Tensor | None:
        """A tensor that may be absent."""
        try:
            return self[suffix]
        except CheckpointError:
            return None

    def part(self, name: str) -> StoredTensors:
        """Tensors of a module inside this one."""
        return StoredTensors(f"{self.module}.{name}", self.get)


@contextmanager
def about(module: str) -> Iterator[None]:
    """Puts the module's name before what a SchemeError says."""
    try:
        yield
    except SchemeError as error:
        raise SchemeError(f"{module}: {error.problem}", error.remedy) from error


def owners(names: Iterable[str], suffix: str) -> list[str]:
    """Modules that own a tensor with this suffix, sorted."""
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def cast_exactly(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in the dtype that is stored. Raises SchemeError when that would change a value."""
    import torch

    stored = scale.to(dtype)
    changed = (stored.to(torch.float64) != scale.to(torch.float64)) & ~scale.isnan()
    if bool(changed.any()):
        worst = scale[changed].abs()
        raise SchemeError(
            f"{int(changed.sum())} of {scale.numel()} scales (|scale| {float(worst.min()):.3g} to "
            f"{float(worst.max()):.3g}) have no exact {str(dtype).removeprefix('torch.')} value",
            "Keep the format that the checkpoint has, or use --format dense",
        )
    return stored


def row_scales(scale: Tensor, rows: int, groups: int) -> Tensor:
    """Scales `[O, G]` as read, also of a file with one scale for the whole matrix. Raises SchemeError for others."""
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(rows, 1)
    if scale.numel() != rows * groups:
        raise SchemeError(f"scales {tuple(scale.shape)} must be {(rows, groups)}")
    return scale.reshape(rows, groups).contiguous()


def check_activation_order(module: str, group_index: Tensor | None, in_features: int, group_size: int | None) -> None:
    """Raises CheckpointError unless a group index only repeats `column // group_size`: codes are in the original column
    order here."""
    import torch

    if group_index is None:
        return
    plain, groups = torch.arange(in_features) // (group_size or in_features), group_index.flatten().to(torch.int64)
    if torch.equal(groups, plain):
        return
    if torch.equal(groups.sort().values, plain):
        raise CheckpointError(
            f"{module} is stored with an activation-order group index (desc_act), which no kernel multiplies",
            "Quantize it again: compress quantize takes it as its source",
        )
    raise CheckpointError(
        f"{module} has an index of {len(groups.unique())} groups for {len(groups)} columns, but bits and group_size in "
        f"config.json mean {len(plain.unique())} for {in_features}",
        "Correct bits and group_size in config.json, or take both from one revision",
    )


def nonfinite_problems(name: str, values: Tensor) -> Iterator[str]:
    """A line when unquantized values are NaN or infinite."""
    from compress.common.device import count_nonfinite

    if count_nonfinite(values):
        yield f"{name} holds NaN or infinity"


def scale_problems(module: str, scale: Tensor) -> Iterator[str]:
    """A line when scales are NaN or infinite."""
    from compress.common.device import count_nonfinite

    if bad := count_nonfinite(scale):
        yield f"{module} has {bad} scales that are not finite"
