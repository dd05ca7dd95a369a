"""Pruning: sets the least important weights to zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from compress.checkpoint.weights import NMSparsity
from compress.common.cli import option
from compress.common.errors import RecipeError
from compress.methods import base as methods
from compress.methods.owl import DEFAULT_LAMBDA, DEFAULT_M, OutlierShares
from compress.plan import LayerPlan, PlanRow, Pruning
from compress.stages.base import STAGES, TensorStage, method_help

UNIFORM, OWL = "uniform", "owl"
ANYWHERE = "none"
"""Pattern of zeros anywhere, as it is written."""
RECORDED = {"owl_m": "outlier_factor", "owl_lambda": "spread"}
"""Names in recorded recipes, where they differ."""


def read_pattern(text: str) -> NMSparsity | None:
    """Parses a pattern as it is written. Raises SchemeError."""
    return None if text == ANYWHERE else NMSparsity.parse(text)


@STAGES.register()
@dataclass(frozen=True)
class PruneStage(TensorStage):
    """Sets the least important weights to zero. A later quantize stage keeps those zeros exact."""

    name: ClassVar[str] = "prune"

    method: str = option(default=methods.default("prune"), help=partial(method_help, "prune"))
    pattern: NMSparsity | None = option(
        default=None,
        written=str,
        start=ANYWHERE,
        read=read_pattern,
        metavar="N:M|none",
        help="2:4, 4:8 or another N:4 or N:8, zeros not stored; none prunes anywhere.",
    )
    sparsity: float = option(
        default=0.5, limits={"above": 0, "below": 1}, help="Share of the weights to remove, with --pattern none."
    )
    layerwise: str = option(
        default=UNIFORM,
        words=(UNIFORM, OWL),
        help="uniform prunes all blocks alike; owl prunes blocks with outliers less and the others more.",
    )
    owl_lambda: float = option(
        default=DEFAULT_LAMBDA,
        help="Largest difference of a block's sparsity from the mean, with --layerwise owl.",
    )
    owl_m: float = option(
        default=DEFAULT_M,
        limits={"above": 1},
        help="Scores above this many times their mean are outliers, with --layerwise owl.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        methods.PRUNING.find(self.method)
        if self.pattern and self.sparsity != 0.5 and self.sparsity != self.share:
            raise RecipeError(f"sparsity={self.sparsity} contradicts {self.pattern}", "Give one of them")
        if self.layerwise == OWL:
            self._check_owl()
        elif (self.owl_lambda, self.owl_m) != (DEFAULT_LAMBDA, DEFAULT_M):
            problem = f"owl_lambda={self.owl_lambda:g} and owl_m={self.owl_m:g} have no effect without layerwise owl"
            raise RecipeError(problem, "Add --layerwise owl, or leave them out")

    def _check_owl(self) -> None:
        if not 0 < self.owl_lambda < min(self.share, 1 - self.share):
            problem = f"owl_lambda={self.owl_lambda} around a sparsity of {self.share:g} leaves 0 to 1"
            raise RecipeError(problem, f"Use --owl-lambda {DEFAULT_LAMBDA}")
        if self.pattern and self.owl_lambda * self.pattern.m < 0.5:
            raise RecipeError(
                f"{self.pattern} has steps of 1/{self.pattern.m}, too coarse for owl_lambda={self.owl_lambda}",
                "Use 4:8, a larger --owl-lambda, or no pattern",
            )

    @property
    def share(self) -> float:
        """Share of the weights that go."""
        return 1 - self.pattern.n / self.pattern.m if self.pattern else self.sparsity

    @property
    def needs_calibration(self) -> bool:
        return methods.PRUNING.find(self.method).needs(None).inputs or self.layerwise == OWL

    @property
    def label(self) -> str:
        return f"{self.method}-{self.pattern or ANYWHERE}{'' if self.layerwise == UNIFORM else f'-{self.layerwise}'}"

    @property
    def work(self) -> Pruning:
        """The work on each linear."""
        shares = OutlierShares(self.owl_lambda, self.owl_m) if self.layerwise == OWL else None
        return Pruning(methods.PRUNING.find(self.method), self.pattern, self.share, shares)

    def apply(self, before: LayerPlan, in_features: int, ignored: bool) -> LayerPlan:
        return before.changed(pruning=None if ignored else self.work)

    def notes(self, rows: Sequence[PlanRow], context_length: int | None) -> list[str]:
        if not any(row.layer_plan and row.layer_plan.pruning == self.work for row in rows):
            return []
        notes = []
        if self.layerwise == OWL:
            notes.append(
                f"a first pass over all blocks counts outliers and sets how much of each is pruned "
                f"({self.work.layerwise}): the plan shows the mean"
            )
        if not self.pattern:
            notes.append("pruning without a pattern makes no layer smaller: its zeros are stored like other values")
        return notes

    def work_keys(self) -> dict[str, Any]:
        return {"method": self.method, "pattern": str(self.pattern or ANYWHERE)}

    def to_dict(self) -> dict[str, Any]:
        pattern = self.pattern.to_dict() if self.pattern else None
        return {RECORDED.get(name, name): value for name, value in (asdict(self) | {"pattern": pattern}).items()}
