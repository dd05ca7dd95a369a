"""Experts of a mixture that are stored together, one tensor for the same part of all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor `[experts, ...]`, each slice of which holds the rows of one tensor of an expert, or of several.

    Attributes:
        name: of the tensor.
        parts: names of the tensors in a slice, relative to the expert.
        transposed: a slice is stored `[in_features, out_features]`.
        interleaved: rows of the parts take turns; else a part follows the other.
        splits_packed: transformers reads experts one by one where compressed-tensors packs any weight of the model.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    splits_packed: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """The place of one tensor of an expert.

    Attributes:
        part: index among the parts of the stack.
    """

    stack: Stack
    expert: int
    part: int

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor in a stack of the shape `stored`."""
        rows, *rest = reversed(stored[1:]) if self.stack.transposed else stored[1:]
        return rows // len(self.stack.parts), *rest

    def rows(self, stored: int) -> slice:
        """Rows of the tensor among `stored` rows."""
        parts = len(self.stack.parts)
        if self.stack.interleaved:
            return slice(self.part, None, parts)
        return slice(self.part * stored // parts, (self.part + 1) * stored // parts)
