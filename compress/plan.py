"""The plan of a run: the work on every tensor, decided before anything runs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from compress.checkpoint.weights import NM, NMSparsity, Scheme
from compress.methods.base import FactorizationMethod, Needs, PruningMethod, QuantizationMethod
from compress.methods.owl import OutlierShares
from compress.models.architecture import SmoothingMapping
from compress.targets import without_indices


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which weights of a linear become zero: N:M by `pattern`, or a share `sparsity` of all.

    With `layerwise` both are means, from which a first pass over the model sets those of each block.
    """

    method: PruningMethod
    pattern: NMSparsity | None
    sparsity: float
    layerwise: OutlierShares | None = None

    def __str__(self) -> str:
        amount = str(self.pattern) if self.pattern else f"{round(100 * self.sparsity, 1):g}%"
        return f"{self.method.name} {amount}{f' ({self.layerwise})' if self.layerwise else ''}"


@dataclass(frozen=True, slots=True)
class Factoring:
    """Factorization of one linear. `allocation`: block and model share ranks out when more is known
    (`compress.methods.low_rank.share_out`), so the planned rank may change; uniform keeps it."""

    method: FactorizationMethod
    keep_ratio: float
    allocation: str = "uniform"

    @property
    def is_shared(self) -> bool:
        return self.allocation != "uniform"

    def __str__(self) -> str:
        return f"{self.method.name} {self.keep_ratio:.0%}"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The work on one linear.

    Attributes:
        scheme: stored form of the weight; None is dense, zeros and all.
        pruning: applied before quantization.
        factoring: how the factors are made whose rank `scheme` has.
    """

    method: QuantizationMethod | None
    scheme: Scheme | None
    options: Any = None
    pruning: Pruning | None = None
    factoring: Factoring | None = None

    @property
    def needs(self) -> Needs:
        """The data that its methods read besides the weight."""
        found = self.method.needs(self.options) if self.method else Needs()
        if self.pruning:
            found |= self.pruning.method.needs(None)
        return found | self.factoring.method.needs(None) if self.factoring else found

    @property
    def is_tuned(self) -> bool:
        """Whether its rounding is learned."""
        return self.method is not None and self.method.tunes

    @property
    def layerwise_pruning(self) -> Pruning | None:
        """Its pruning if the sparsity depends on the block."""
        return self.pruning if self.pruning and self.pruning.layerwise else None

    @property
    def needs_first_pass(self) -> bool:
        """Whether the whole model has to be observed before this plan is final."""
        return self.layerwise_pruning is not None or self.shares_ranks

    @property
    def shares_ranks(self) -> bool:
        """Whether its rank is decided together with those of the whole model."""
        return self.factoring is not None and self.factoring.allocation == "model"

    @property
    def quantized(self) -> Scheme | None:
        """The integers the weight is rounded to; None when it is not."""
        return None if self.method is None else self.scheme

    def changed(self, **parts: Any) -> LayerPlan:
        """Returns the plan with other parts, in the scheme that follows from all of them."""
        plan = replace(self, **{"scheme": self.quantized, **parts})
        pattern = plan.pruning and plan.pruning.pattern
        return replace(plan, scheme=NM.of(plan.scheme, pattern)) if pattern else plan

    def __str__(self) -> str:
        work = [str(self.pruning)] if self.pruning else []
        if self.factoring and self.scheme:
            work.append(f"{self.factoring} {'about ' if self.factoring.is_shared else ''}rank {self.scheme.rank}")
        stored = self.scheme.codes if self.factoring and self.scheme else self.scheme
        return " + ".join([*work, f"{self.method.name} {stored}"] if self.method else work)


UNCHANGED = LayerPlan(None, None)


@dataclass(frozen=True, slots=True)
class End:
    """The token embedding or the output head. Only a stage that names it changes it.

    Attributes:
        shape: `[V, H]`; None when it has no matrix of its own.
        methods: of quantization that are of use here.
    """

    what: str
    shape: tuple[int, int] | None
    methods: tuple[str, ...]


SHAPE_TENSOR_BYTES = 16
"""Bytes of the `weight_shape` of every packed weight; not counted as a weight."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One stored tensor of the source.

    Attributes:
        layer_plan: the work on it; None when it stays as it is.
        reason: why it is stored dense; empty otherwise.
        kept: scheme of codes that a quantized source stores, and the result as well; None for others.
    """

    tensor: str
    shape: tuple[int, ...]
    layer_plan: LayerPlan | None
    reason: str
    bytes_before: int
    bytes_after: int
    kept: Scheme | None = None

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
        smoothing_mappings: smoothing mappings in use, by block index.
        scale_dtype: dtype in which scales are stored: the model's.
        removed_bytes: of the parts of the source that a shrink stage removes, which have no rows.
    """

    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]
    smoothing_mappings: tuple[tuple[SmoothingMapping, ...], ...]
    scale_dtype: str
    removed_bytes: int = 0

    @property
    def changed(self) -> list[PlanRow]:
        """Rows that the recipe does something to."""
        return [row for row in self.rows if row.layer_plan is not None]

    @property
    def packed(self) -> list[PlanRow]:
        """Rows that are stored in fewer bits."""
        return [row for row in self.changed if row.layer_plan is not None and row.layer_plan.scheme is not None]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Schemes of packed linears, by module name."""
        found = {name: each.scheme for name, each in self.layer_plans.items()}
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    @property
    def kept(self) -> dict[str, Scheme]:
        """Schemes of weights that keep the codes of the source, by module name."""
        return {row.tensor.removesuffix(".weight"): row.kept for row in self.rows if row.kept is not None}

    @property
    def layer_plans(self) -> dict[str, LayerPlan]:
        """Plans of changed linears, by module name."""
        return {row.tensor.removesuffix(".weight"): row.layer_plan for row in self.rows if row.layer_plan is not None}

    @property
    def needs(self) -> Needs:
        """The data that all methods together read besides the weights."""
        return functools.reduce(operator.or_, (each.needs for each in self.layer_plans.values()), Needs())

    @property
    def needs_first_pass(self) -> bool:
        """Whether the whole model has to be observed before the plan is final."""
        return any(each.needs_first_pass for each in self.layer_plans.values())

    def in_block(self, block: str) -> dict[str, LayerPlan]:
        """Assignments by name inside a block."""
        prefix = f"{block}."
        return {name.removeprefix(prefix): each for name, each in self.layer_plans.items() if name.startswith(prefix)}

    @property
    def bytes_before(self) -> int:
        return self.removed_bytes + sum(row.bytes_before for row in self.rows)

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
    """Return the bytes of the shapes stored with a packed weight: one for each matrix of packed integers."""
    return SHAPE_TENSOR_BYTES * scheme.num_shapes


Kind = tuple[str, tuple[int, ...], LayerPlan | None, str, Scheme | None]
"""All of a row but its indices and bytes."""


def by_kind(rows: Iterable[PlanRow]) -> dict[Kind, list[PlanRow]]:
    """Rows that differ in nothing but their indices, together."""
    kinds: dict[Kind, list[PlanRow]] = {}
    for row in rows:
        kinds.setdefault((row.kind, row.shape, row.layer_plan, row.reason, row.kept), []).append(row)
    return kinds


def _summary(kind: Kind, rows: list[PlanRow]) -> dict[str, Any]:
    name, shape, layer_plan, reason, kept = kind
    return {
        "tensor": name,
        "shape": list(shape),
        "count": len(rows),
        "method": layer_plan.method.name if layer_plan and layer_plan.method else None,
        "pruning": str(layer_plan.pruning) if layer_plan and layer_plan.pruning else None,
        "factoring": str(layer_plan.factoring) if layer_plan and layer_plan.factoring else None,
        "scheme": str((layer_plan.scheme if layer_plan else kept) or "dense"),
        "reason": reason,
        "bytes_before": sum(row.bytes_before for row in rows),
        "bytes_after": sum(row.bytes_after for row in rows),
    }
