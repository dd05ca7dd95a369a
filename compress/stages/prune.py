"""The stage that sets weights to zero."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import Sparsity
from compress.stages.words import nearest

PRUNING_METHODS = ("sparsegpt", "wanda", "ria", "magnitude")


@dataclass(frozen=True, slots=True)
class PruneStage:
    """Sets the least important weights to zero. A later quantize stage keeps those zeros exact.

    Attributes:
        method: sparsegpt, wanda, ria, or magnitude (no calibration).
        pattern: N:M, stored without its zeros; None prunes a `sparsity` of the weights wherever they stand, and the
            zeros are stored.
        sparsity: share of the weights that go; a pattern decides it itself.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay as they are.
    """

    method: str = "sparsegpt"
    pattern: Sparsity | None = None
    sparsity: float = 0.5
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in PRUNING_METHODS:
            raise RecipeError(
                f"pruning method {self.method!r} does not exist", nearest(self.method, PRUNING_METHODS, "Methods")
            )
        if not 0 < self.sparsity < 1:
            raise RecipeError(f"sparsity={self.sparsity} is not between 0 and 1", "Use --sparsity 0.5")
        if self.pattern and self.sparsity != 0.5 and self.sparsity != 1 - self.pattern.kept / self.pattern.of:
            raise RecipeError(f"sparsity={self.sparsity} contradicts {self.pattern}", "Give one of them")

    @property
    def needs_calibration(self) -> bool:
        return self.method != "magnitude"
