"""The stage that sets weights to zero."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import Sparsity
from compress.stages.words import nearest

PRUNING_METHODS = ("sparsegpt", "wanda", "ria", "magnitude")
LAYERWISE = ("uniform", "owl")
DEFAULT_OUTLIER_FACTOR = 5.0
DEFAULT_SPREAD = 0.08
"""The spread that the paper of OWL uses throughout."""


@dataclass(frozen=True, slots=True)
class PruneStage:
    """Sets the least important weights to zero. A later quantize stage keeps those zeros exact.

    Attributes:
        method: sparsegpt, wanda, ria, or magnitude (no calibration).
        pattern: N:M, stored without its zeros; None prunes a `sparsity` of the weights wherever they stand, and the
            zeros are stored.
        sparsity: share of the weights that go; a pattern decides it itself.
        layerwise: uniform prunes every block alike; owl spares those with outliers, see `compress.layerwise`.
        outlier_factor, spread: owl's M and lambda.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay as they are.
    """

    method: str = "sparsegpt"
    pattern: Sparsity | None = None
    sparsity: float = 0.5
    layerwise: str = "uniform"
    outlier_factor: float = DEFAULT_OUTLIER_FACTOR
    spread: float = DEFAULT_SPREAD
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
        if self.layerwise not in LAYERWISE:
            remedy = nearest(self.layerwise, LAYERWISE, "Ways")
            raise RecipeError(f"layerwise {self.layerwise!r} does not exist", remedy)
        if self.layerwise != "uniform":
            self._check_layerwise()
        elif (self.outlier_factor, self.spread) != (DEFAULT_OUTLIER_FACTOR, DEFAULT_SPREAD):
            problem = f"outlier_factor={self.outlier_factor:g} and spread={self.spread:g} mean nothing where all blocks"
            raise RecipeError(f"{problem} are pruned alike", "Add --layerwise owl, or leave them out")

    def _check_layerwise(self) -> None:
        share = self.share
        if not 0 < self.spread < min(share, 1 - share):
            raise RecipeError(
                f"spread={self.spread} around a sparsity of {share:g} leaves 0 to 1", f"Use --spread {DEFAULT_SPREAD}"
            )
        if self.outlier_factor <= 1:
            raise RecipeError(f"outlier_factor={self.outlier_factor} makes outliers of most weights", "Use 5")
        if self.pattern and self.spread * self.pattern.of < 0.5:
            raise RecipeError(
                f"{self.pattern} has steps of 1/{self.pattern.of}, too coarse for a spread of {self.spread}",
                "Use 4:8, a larger spread, or no pattern",
            )

    @property
    def share(self) -> float:
        """Share of the weights that go."""
        return 1 - self.pattern.kept / self.pattern.of if self.pattern else self.sparsity

    @property
    def needs_calibration(self) -> bool:
        return self.method != "magnitude" or self.layerwise != "uniform"
