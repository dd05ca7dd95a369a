"""Options of `compress prune`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from compress.checkpoint.scheme import Sparsity
from compress.stages.prune import DEFAULT_OUTLIER_FACTOR, DEFAULT_SPREAD, PruneStage


@dataclass(frozen=True, slots=True)
class PruningOptions:
    """Which weights go."""

    method: Annotated[str, typer.Option(help="sparsegpt, wanda, ria, or magnitude (needs no calibration).")] = (
        "sparsegpt"
    )
    pattern: Annotated[
        str,
        typer.Option(
            metavar="N:M|none", help="2:4, 4:8 or another N:4 or N:8, zeros not stored; none prunes anywhere."
        ),
    ] = "2:4"
    sparsity: Annotated[float, typer.Option(help="Share of the weights that go, with --pattern none.")] = 0.5
    layerwise: Annotated[
        str, typer.Option(help="uniform prunes all blocks alike; owl prunes those with outliers less, others more.")
    ] = "uniform"
    spread: Annotated[
        float, typer.Option(help="Most that a block's sparsity differs from the mean, with --layerwise owl.")
    ] = DEFAULT_SPREAD
    outlier_factor: Annotated[
        float, typer.Option(help="Scores above this many times their mean are outliers, with --layerwise owl.")
    ] = DEFAULT_OUTLIER_FACTOR

    def stage(self, ignore: tuple[str, ...]) -> PruneStage:
        """What the options say, for all layers but those that match `ignore`. Raises RecipeError, SchemeError."""
        pattern = None if self.pattern == "none" else Sparsity.parse(self.pattern)
        return PruneStage(
            self.method, pattern, self.sparsity, self.layerwise, self.outlier_factor, self.spread, ignore=ignore
        )

    @property
    def name(self) -> str:
        """A short one, for recipes and reports."""
        name = f"{self.method}-{self.pattern}"
        return name if self.layerwise == "uniform" else f"{name}-{self.layerwise}"
