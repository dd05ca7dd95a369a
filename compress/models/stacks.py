"""Matrices that are stored together: one tensor for the same part of all experts of a mixture, or for queries, keys and
values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor `[experts, ...]`, each slice of which holds the rows of one tensor of an expert, or of several; or a
    tensor of such rows only.

    Attributes:
        parts: names of the tensors in a slice, relative to the expert.
        transposed: a slice is stored `[in_features, out_features]`.
        interleaved: rows of the parts take turns; else a part follows the other.
        columns: in_features of a slice that is never transposed where it has them last; 0 if files do not differ.
        sizes: rows of the parts in a tensor without experts; () for equal ones of each expert.
        splits_packed: transformers reads experts one by one where compressed-tensors packs any weight of the model.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    columns: int = 0
    sizes: tuple[int, ...] = ()
    splits_packed: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """The place of one tensor, of an expert or of a layer.

    Attributes:
        expert: its index; 0 in a stack without experts.
        part: index among the parts of the stack.
    """

    stack: Stack
    expert: int
    part: int

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor in a stack of the shape `stored`."""
        if self.stack.sizes:
            return self.stack.sizes[self.part], *stored[1:]
        rows, *rest = reversed(stored[1:]) if self.stack.transposed else stored[1:]
        return rows // len(self.stack.parts), *rest

    def rows(self, stored: int) -> slice:
        """Rows of the tensor among `stored` rows."""
        if self.stack.sizes:
            first = sum(self.stack.sizes[: self.part])
            return slice(first, first + self.stack.sizes[self.part])
        parts = len(self.stack.parts)
        if self.stack.interleaved:
            return slice(self.part, None, parts)
        return slice(self.part * stored // parts, (self.part + 1) * stored // parts)
