"""What goes into the quantization of one block, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import PackedWeight
from compress.models.spec import SmoothingMapping
from compress.plan import LayerPlan
from compress.recipe import Tuning


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """What happened to one linear: for the report.

    Attributes:
        input_outlier: its largest input over the median of its channels' largest, before smoothing; None when nothing
            was observed.
        rank: of its factors; None when it has none.
        kept_whole: why it has none although it was to be factorized; empty otherwise.
    """

    module: str
    method: str
    relative_error: float
    recovery: str = ""
    damping: float | None = None
    dead_columns: int = 0
    clipped: bool = False
    pruning: str = ""
    zeros: float = 0.0
    input_outlier: float | None = None
    factoring: str = ""
    rank: int | None = None
    kept_whole: str = ""


@dataclass(frozen=True, slots=True)
class EdgeRecord:
    """What smoothing one edge gave."""

    source: str
    targets: tuple[str, ...]
    ratio: float
    loss_before: float
    loss_after: float


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """What learning the rounding of a block gave.

    Attributes:
        steps: that were taken.
        best_step: after which the error was least; 0 when never below the start's, which was kept.
        loss_before, loss_after: squared error of the block's output on the search sequences, relative to the output.
        changed: share of the codes that differ from the start's.
    """

    steps: int
    best_step: int
    loss_before: float
    loss_after: float
    changed: float


@dataclass
class BlockOutcome:
    """A finished block.

    Attributes:
        weights: packed weights by full module name.
        pruned: weights stored dense, zeros and all, by full tensor name.
        dense: tensors that stay dense, by full name, as stored.
        hidden: `[N, L, H]`, input of the next block; None when nothing is calibrated.
        reference: `[N, L, H]`, the same of the dense model; None when nothing asks for it.
        relative_error: squared error of the block's output over the square of what the block adds, on search sequences.
    """

    weights: dict[str, PackedWeight] = field(default_factory=dict)
    pruned: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    reference: Tensor | None = None
    relative_error: float | None = None
    linears: list[LinearRecord] = field(default_factory=list)
    edges: list[EdgeRecord] = field(default_factory=list)
    tuning: TuningRecord | None = None

    def keep(self, stored: PackedWeight | Tensor, record: LinearRecord) -> None:
        """Adds what became of one linear, in host memory."""
        stored = stored.cpu()
        if isinstance(stored, Tensor):
            self.pruned[f"{record.module}.weight"] = stored
        else:
            self.weights[record.module] = stored
        self.linears.append(record)

    def facts(self) -> dict[str, Any]:
        """The JSON-able part, for the piece's metadata and the report."""
        return {
            "relative_error": self.relative_error,
            "linears": [asdict(record) for record in self.linears],
            "smoothing": [asdict(record) for record in self.edges],
            "tuning": asdict(self.tuning) if self.tuning else None,
        }


@dataclass(frozen=True, slots=True)
class BlockJob:
    """One block's share of the plan.

    Attributes:
        index: which block.
        assignments: what happens to each linear, by name inside the block.
        edges: smoothing edges in use.
        scale_dtype: dtype in which scales are stored.
        head_dim: channels of an attention head.
        seed: the recipe's.
    """

    index: int
    assignments: Mapping[str, LayerPlan]
    edges: Sequence[SmoothingMapping]
    scale_dtype: torch.dtype
    head_dim: int = 1
    seed: int = 0

    @property
    def tuning(self) -> Tuning | None:
        """How rounding is learned, where it is."""
        return next((each.tuning for each in self.assignments.values() if each.tuning is not None), None)

    @property
    def with_quantized_inputs(self) -> dict[str, Scheme]:
        """Linears whose inputs are rounded to 8 bits when they are served."""
        schemes = {name: each.scheme for name, each in self.assignments.items() if each.scheme}
        return {name: scheme for name, scheme in schemes.items() if scheme.activation_bits}
