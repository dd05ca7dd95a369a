"""Finishing: scales, norms and biases trained on the logits of the dense model, while codes and the format stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compress.common.cli import Key, option
from compress.common.errors import RecipeError
from compress.stages.base import STAGES, Stage, TensorStage
from compress.stages.shrink import ShrinkStage

LOSS_HELP = (
    "kl trains scales, norms and biases of the packed model so that its logits match the dense model's; codes and the "
    "format stay."
)


@STAGES.register(order=1)
@dataclass(frozen=True)
class FinishStage(Stage):
    """Training of scales, norms and biases of the packed model on the logits of the dense one."""

    name: ClassVar[str] = "finish"
    is_single: ClassVar[bool] = True
    added_by: ClassVar[Key | None] = (
        "finish",
        str | None,
        option(default=None, metavar="LOSS", help=f"{LOSS_HELP} Default: off."),
    )

    loss: str = option(default="kl", words=("kl",), help=LOSS_HELP)
    steps: int = option(default=100, limits={"at least": 1}, help="Gradient steps.")
    learning_rate: float | None = option(
        default=None,
        limits={"above": 0},
        help="Largest step of a number, as a share of itself; it falls to 0. Default: 0.006 times the square root of "
        "the KL at the start.",
    )
    batch: int = option(default=2, limits={"at least": 1}, help="Sequences of a step.")
    rank: int = option(
        default=0,
        limits={"at least": 0},
        help="Rank of updates of matrices in 16 bits (LoRA), which are added to them: heals a model that was pruned or "
        "shrunk and is not rounded. Zeros stay. 0: none.",
    )
    top_k: int = option(
        default=256,
        limits={"at least": 1},
        help="Likeliest tokens of a position whose probabilities are compared.",
    )
    needs_calibration = True

    def check_among(self, stages: Sequence[Stage]) -> None:
        super().check_among(stages)
        if not any(isinstance(stage, TensorStage | ShrinkStage) for stage in stages):
            raise RecipeError("finish has no stage whose result it could train", "Add one, or use compress finish")
