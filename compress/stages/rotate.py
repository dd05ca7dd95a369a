"""Rotation of a whole model before all other stages; applied by `compress.pipeline.rotated_source`.

QuaRot (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, section 3) and SpinQuant (Liu et al. 2024,
https://arxiv.org/abs/2405.16406); `compress.methods.shared.hadamard` has the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compress.common.cli import Key, option
from compress.common.errors import RecipeError
from compress.plan import PlanRow
from compress.stages.base import STAGES, Stage


@STAGES.register(order=-1)
@dataclass(frozen=True)
class RotateStage(Stage):
    """Rotation of the residual stream and the value heads by randomized Hadamard matrices, folded into the weights
    around them: preserves the function of the model, and removes outlier channels from weights and hidden states. Must
    be the first stage."""

    name: ClassVar[str] = "rotate"
    added_by: ClassVar[Key | None] = (
        "rotate",
        bool | None,
        option(
            "--rotate",
            default=None,
            help="Rotate the residual stream by a Hadamard matrix first, folded into the weights: helps with one scale "
            "per row and with outlier channels.",
        ),
    )

    heads: bool = option(default=True, help="Also rotate the value heads.")
    label = "rotated"

    def check_among(self, stages: Sequence[Stage]) -> None:
        if stages[0] is not self:
            raise RecipeError("rotate is not the first stage", "Put it first: every other stage works on its result")

    def notes(self, rows: Sequence[PlanRow], context_length: int | None) -> list[str]:
        if not any(row.layer_plan and row.layer_plan.pruning for row in rows):
            return []
        return [
            "a rotation spreads every weight over its whole row before it is pruned, so that few are small: compare "
            "with the same recipe without `rotate`"
        ]
