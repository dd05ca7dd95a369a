"""How long and how fast rounding is learned: options of the method `signround`."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Tuning:
    """Learned rounding of one block.

    Attributes:
        steps: of gradient descent, for each block.
        lr: how far an offset moves in the first step, in steps of the weight's grid; None means 1 / steps, with which
            an offset can just reach its limit. It falls linearly to zero.
        batch: calibration sequences in a step.
    """

    steps: int = 200
    lr: float | None = None
    batch: int = 4

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise RecipeError(f"steps={self.steps} learns nothing", "Use --steps 200, or method gptq, where it starts")
        if self.lr is not None and not 0 < self.lr <= 0.5:
            raise RecipeError(f"lr={self.lr} is outside 0 to 0.5", "Leave it out: 1 / steps")
        if self.batch < 1:
            raise RecipeError(f"batch={self.batch} has no sequences", "Use batch: 4")

    @property
    def first_rate(self) -> float:
        return 1 / self.steps if self.lr is None else self.lr
