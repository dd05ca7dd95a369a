"""The stage that makes two smaller matrices of one."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError
from compress.stages.words import nearest

FACTORIZING_METHODS = ("svd-llm", "asvd", "svd")
ALLOCATIONS = ("block", "model", "uniform")


@dataclass(frozen=True, slots=True)
class FactorizeStage:
    """Makes two smaller matrices of each linear, its product of low rank. A later quantize stage rounds both.

    Attributes:
        method: svd-llm (whitened by the inputs), asvd (inputs scaled by their magnitudes), or svd (no calibration).
        keep: share of the weights that stay: a rank of `keep * O * I / (O + I)`, rounded down to a multiple of 8.
        allocation: block shares the ranks out among the linears of a block for the least loss; model among those of all
            blocks, after a first pass; uniform gives each linear its own share.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay as they are.
        target_size: bytes of the whole checkpoint's tensors, which decide `keep`; for allocation model.
    """

    method: str = "svd-llm"
    keep: float = 0.8
    allocation: str = "block"
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    target_size: int | None = None

    def __post_init__(self) -> None:
        if self.method not in FACTORIZING_METHODS:
            remedy = nearest(self.method, FACTORIZING_METHODS, "Methods")
            raise RecipeError(f"factorizing method {self.method!r} does not exist", remedy)
        if self.allocation not in ALLOCATIONS:
            remedy = nearest(self.allocation, ALLOCATIONS, "Allocations")
            raise RecipeError(f"allocation {self.allocation!r} does not exist", remedy)
        if self.target_size is not None and (self.allocation != "model" or self.target_size < 1):
            problem = f"target_size={self.target_size} with allocation {self.allocation!r} means nothing"
            raise RecipeError(problem, "Give allocation: model a size above 0")
        if not 0 < self.keep < 1:
            raise RecipeError(f"keep={self.keep} is not between 0 and 1", "Use --keep 0.8 to keep 80 % of the weights")

    @property
    def needs_calibration(self) -> bool:
        return self.method != "svd"
