"""Factorization: replaces each weight by the product of two smaller matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from compress.common.cli import option, size_in_bytes
from compress.common.errors import RecipeError
from compress.methods import base as methods
from compress.plan import Factoring, LayerPlan, PlanRow
from compress.stages.base import STAGES, Stage, TensorStage, method_help

READ_RATE = 4.2e12
"""Bytes per second that a large GPU reads (measured on an H200); others read less, and then less must be saved."""
LAUNCH_SECONDS = 4e-6
"""Start and tail of one more product in a CUDA graph, measured on an H200: docs/gpu-kernels.md."""
LEAST, MOST, HALVINGS = 0.01, 0.99, 20
"""Range of `keep` for a size of the checkpoint, and the steps of its bisection."""

KEPT_WHOLE = (
    "those of the plan are the uniform ones, and a layer whose factors would be no smaller than itself is kept whole"
)
SHARED_OUT = {
    "model": "a first pass over all blocks finds what each rank keeps, and ranks are shared out over the whole model",
    "block": "ranks are shared out inside each block when it is reached",
}
"""Notes on decisions made during the run, by allocation."""


@STAGES.register()
@dataclass(frozen=True)
class FactorizeStage(TensorStage):
    """Makes two smaller matrices of each linear, its product of low rank. A later quantize stage rounds both.

    Attributes:
        keep: share of the weights that stay: a rank of `keep * O * I / (O + I)`, rounded down to a multiple of 8.
        target_size: bytes of the whole checkpoint's tensors, which decide `keep`; for allocation model.
    """

    name: ClassVar[str] = "factorize"

    method: str = option(default=methods.default("factorize"), help=partial(method_help, "factorize"))
    keep: float = option(
        default=0.8,
        written=float | None,
        start=None,
        limits={"above": 0, "below": 1},
        help="Share of the weights to keep. Default: 0.8.",
    )
    allocation: str = option(
        default="block",
        words=("block", "model", "uniform"),
        help="block allocates ranks to the layers of a block, model to all layers; uniform gives all the same share.",
    )
    target_size: int | None = option(
        default=None,
        written=str | int | None,
        typed=str | None,
        read=size_in_bytes,
        metavar="SIZE",
        help="5GB, 700MB: decides --keep, with --allocation model.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        methods.FACTORIZATION.find(self.method)
        if self.target_size is not None and (self.allocation != "model" or self.target_size < 1):
            problem = f"target_size={self.target_size} with allocation {self.allocation!r} has no effect"
            raise RecipeError(problem, "Give allocation: model a size above 0")

    @classmethod
    def build(cls, written: Mapping[str, Any], **changes: Any) -> Self:
        if written.get("keep") is not None and written.get("target_size") is not None:
            raise RecipeError("keep and target_size both decide the ranks", "Give one of them")
        return super().build(written, **changes)

    @property
    def needs_calibration(self) -> bool:
        return methods.FACTORIZATION.find(self.method).needs(None).inputs

    @property
    def label(self) -> str:
        return f"{self.method}-{self.keep:g}"

    def check_among(self, stages: Sequence[Stage]) -> None:
        others = (each for each in stages if each is not self and isinstance(each, FactorizeStage))
        if self.target_size is not None and any(each.target_size is not None for each in others):
            raise RecipeError("two stages decide the size of the checkpoint", "Give one of them `keep` instead")

    def apply(self, before: LayerPlan, in_features: int, ignored: bool) -> LayerPlan:
        factoring = Factoring(methods.FACTORIZATION.find(self.method), self.keep, self.allocation)
        return before.changed(factoring=None if ignored else factoring)

    def fitted(self, planned_bytes: Callable[[Stage], int]) -> Stage:
        """Returns the stage with the largest `keep` in the place of a target size."""
        if self.target_size is None:
            return self

        def keeping(share: float) -> FactorizeStage:
            return replace(self, keep=share, target_size=None)

        low, high = LEAST, MOST
        for share in (low, high):
            size = planned_bytes(keeping(share))
            if (size > self.target_size) == (share == low):
                raise RecipeError(
                    f"low rank cannot give {self.target_size:,} bytes: keeping {share:.0%} of the weights takes about "
                    f"{size:,}",
                    "Choose another size, or quantize the factors too" if share == low else "Choose a smaller size",
                )
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if planned_bytes(keeping(middle)) <= self.target_size else (low, middle)
        return keeping(low)

    def notes(self, rows: Sequence[PlanRow], context_length: int | None) -> list[str]:
        factored = (row.layer_plan.factoring for row in rows if row.layer_plan and row.layer_plan.factoring)
        shared = self.allocation in SHARED_OUT and self.allocation in {each.allocation for each in factored}
        return ([f"{SHARED_OUT[self.allocation]}: {KEPT_WHOLE}"] if shared else []) + factor_notes(rows)

    def work_keys(self) -> dict[str, Any]:
        return {"method": self.method, "keep": self.keep, "allocation": self.allocation}


def slower_seconds(whole_bytes: int, factor_bytes: int) -> float:
    """Predicts the extra time of one token's product with factors; negative where they pay.

    For few tokens a product takes as long as its weights are read. The second one costs a launch, for it waits for the
    first.
    """
    return (factor_bytes - whole_bytes) / READ_RATE + LAUNCH_SECONDS


def factor_notes(rows: Sequence[PlanRow]) -> list[str]:
    """Returns one sentence about the layers of a plan for which factors are predicted not to pay."""
    factorized = [row for row in rows if row.layer_plan and row.layer_plan.scheme and row.layer_plan.scheme.rank]
    slower = [row for row in factorized if slower_seconds(_whole_bytes(row), row.bytes_after) > 0]
    if not slower:
        return []
    worst = max(slower, key=lambda row: slower_seconds(_whole_bytes(row), row.bytes_after))
    loss = slower_seconds(_whole_bytes(worst), worst.bytes_after) * 1e6
    return [
        f"{len(slower)} of {len(factorized)} factorized layers are predicted to decode slower on a large GPU than the "
        f"same bits in one piece (e.g. {worst.tensor}: {_whole_bytes(worst):,} bytes whole, {worst.bytes_after:,} as "
        f"factors, {loss:.1f} us more for one token): there factors save space, not time"
    ]


def _whole_bytes(row: PlanRow) -> int:
    """Returns the bytes of the same layer in one piece, in the scheme of its factors."""
    scheme = row.layer_plan.scheme.codes if row.layer_plan and row.layer_plan.scheme else None
    outputs, inputs = row.shape
    return row.bytes_before if scheme is None else scheme.stored_bits(outputs, inputs) // 8
