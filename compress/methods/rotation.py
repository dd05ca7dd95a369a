"""Rotation of a whole model before all other stages; applied by `compress.pipeline.rotated_source`.

QuaRot (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, section 3) and SpinQuant (Liu et al. 2024,
https://arxiv.org/abs/2405.16406); `shared.hadamard` has the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RotateStage:
    """Rotation of the residual stream and the value heads by randomized Hadamard matrices, folded into the weights
    around them: preserves the function of the model, and removes outlier channels from weights and hidden states. Must
    be the first stage.

    Attributes:
        heads: whether values are also rotated, per head.
    """

    heads: bool = True

    @property
    def needs_calibration(self) -> bool:
        return False
