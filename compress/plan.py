"""What will happen to every tensor, decided before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from compress.architectures.architecture import SmoothingEdge
from compress.assignment import Assignment
from compress.checkpoint.scheme import Scheme
from compress.stages.tuning import Tuning
from compress.targets import without_indices

SHAPE_TENSOR_BYTES = 16
"""Bytes of the `weight_shape` that stands beside every packed weight; it is no weight and not counted as one."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One stored tensor of the source.

    Attributes:
        tensor: its name.
        shape: its shape.
        assignment: what is done to it; None when it stays as it is.
        reason: why it is stored dense; empty otherwise.
        bytes_before, bytes_after: stored bytes.
    """

    tensor: str
    shape: tuple[int, ...]
    assignment: Assignment | None
    reason: str
    bytes_before: int
    bytes_after: int

    @property
    def kind(self) -> str:
        return without_indices(self.tensor)

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole of it; printing it is `--dry-run`.

    Attributes:
        rows: every stored tensor of the source.
        notes: what a careful user should know, one sentence each.
        edges: smoothing edges in use, by block index.
        scale_dtype: dtype in which scales are stored: the model's.
    """

    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]
    edges: tuple[tuple[SmoothingEdge, ...], ...]
    scale_dtype: str

    @property
    def changed(self) -> list[PlanRow]:
        """Rows that the recipe does something to."""
        return [row for row in self.rows if row.assignment is not None]

    @property
    def packed(self) -> list[PlanRow]:
        """Rows that are stored in fewer bits."""
        return [row for row in self.changed if row.assignment is not None and row.assignment.scheme is not None]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Of every packed linear, by module name."""
        found = {name: each.scheme for name, each in self.assignments.items()}
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    @property
    def assignments(self) -> dict[str, Assignment]:
        """Of every changed linear, by module name."""
        return {row.tensor.removesuffix(".weight"): row.assignment for row in self.rows if row.assignment is not None}

    @property
    def tuning(self) -> Tuning | None:
        """How rounding is learned; one way for all linears that do."""
        return next((each.tuning for each in self.assignments.values() if each.tuning is not None), None)

    @property
    def uses_gptaq(self) -> bool:
        return any(each.method == "gptaq" for each in self.assignments.values())

    @property
    def follows_dense(self) -> bool:
        """Whether the calibration also passes through the dense model, beside the one that changes."""
        return self.tuning is not None or self.uses_gptaq

    def in_block(self, block: str) -> dict[str, Assignment]:
        """Assignments by name inside a block."""
        prefix = f"{block}."
        return {name.removeprefix(prefix): each for name, each in self.assignments.items() if name.startswith(prefix)}

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the changed linears: codes, places, scales and zero points; 0 where none is."""
        if not self.changed:
            return 0.0
        parameters = sum(row.parameters for row in self.changed)
        extra = sum(map(shape_bytes, self.schemes.values()))
        return 8 * (sum(row.bytes_after for row in self.changed) - extra) / parameters

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits per parameter of the whole model."""
        return 8 * self.bytes_after / sum(row.parameters for row in self.rows if row.bytes_after)

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": [_summary(kind, rows) for kind, rows in by_kind(self.rows).items()],
            "notes": list(self.notes),
            "scale_dtype": self.scale_dtype,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": self.bits_per_weight,
            "bits_per_parameter": self.bits_per_parameter,
        }


def shape_bytes(scheme: Scheme) -> int:
    """Of the shapes that stand beside a packed weight: one for each matrix of packed integers."""
    if scheme.is_float or scheme.activation_bits or scheme.fp8:
        return 0
    return SHAPE_TENSOR_BYTES * (1 if scheme.rank is None else 2)


def by_kind(rows: Iterable[PlanRow]) -> dict[tuple[str, tuple[int, ...], Assignment | None, str], list[PlanRow]]:
    """Rows that differ in nothing but their indices, together."""
    kinds: dict[tuple[str, tuple[int, ...], Assignment | None, str], list[PlanRow]] = {}
    for row in rows:
        kinds.setdefault((row.kind, row.shape, row.assignment, row.reason), []).append(row)
    return kinds


def _summary(kind: tuple[str, tuple[int, ...], Assignment | None, str], rows: list[PlanRow]) -> dict[str, Any]:
    name, shape, assignment, reason = kind
    return {
        "tensor": name,
        "shape": list(shape),
        "count": len(rows),
        "method": assignment.method if assignment else None,
        "pruning": str(assignment.pruning) if assignment and assignment.pruning else None,
        "factoring": str(assignment.factoring) if assignment and assignment.factoring else None,
        "scheme": str(assignment.scheme) if assignment and assignment.scheme else "dense",
        "reason": reason,
        "bytes_before": sum(row.bytes_before for row in rows),
        "bytes_after": sum(row.bytes_after for row in rows),
    }
