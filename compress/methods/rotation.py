"""Rotation of a whole model before all other stages; `compress.pipeline.rotated_source` applies it.

QuaRot (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, section 3) and SpinQuant (Liu et al. 2024,
https://arxiv.org/abs/2405.16406); `shared.hadamard` has the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RotateStage:
    """Rotation of the residual stream and the value heads by randomized Hadamard matrices, folded into the weights
    around them: the model computes the same, without outlier channels in weights and hidden states. It is the first
    stage.

    Attributes:
        heads: whether values are rotated too, head by head.
    """

    heads: bool = True

    @property
    def needs_calibration(self) -> bool:
        return False
