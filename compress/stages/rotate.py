"""The stage that turns the residual stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RotateStage:
    """Turns the residual stream and the value heads by randomized Hadamard matrices, folded into the weights around
    them: the model computes the same, its weights and hidden states have no outlier channels any more. It stands first.

    Attributes:
        heads: whether values are turned too, head by head.
    """

    heads: bool = True

    @property
    def needs_calibration(self) -> bool:
        return False
