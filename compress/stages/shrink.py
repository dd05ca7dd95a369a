"""Structured pruning: whole blocks, heads, MLP channels and experts leave, and an ordinary smaller model stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compress.common.cli import option
from compress.common.errors import RecipeError
from compress.stages.base import STAGES, Stage

SAMPLE_TOKENS = 8192
"""Tokens of the calibration text that blocks are compared on."""


@STAGES.register(order=-1)
@dataclass(frozen=True)
class ShrinkStage(Stage):
    """Removal of whole blocks, and of parts of all others, before all other stages; config.json has smaller sizes."""

    name: ClassVar[str] = "shrink"
    is_single: ClassVar[bool] = True

    blocks: int = option(default=0, limits={"at least": 0}, help="Number of blocks to remove.")
    block_score: str = option(
        default="kl",
        words=("kl", "influence"),
        help="kl removes, one after the other, the block without which the KL to the dense model is least; influence "
        "removes those that turn their inputs least, measured in one pass.",
    )
    heads: int = option(
        default=0,
        limits={"at least": 0},
        help="Number of key-value heads to remove from every block, with the query heads that read them.",
    )
    channels: float = option(
        default=0.0, limits={"at least": 0, "below": 1}, help="Least share of the inner channels of MLPs to remove."
    )
    channel_multiple: int = option(
        default=128, limits={"at least": 1}, help="The number of channels that stay is a multiple of this."
    )
    experts: int = option(
        default=0, limits={"at least": 0}, help="Number of experts to remove from every mixture, by REAP."
    )
    refit: bool = option(
        "--refit/--no-refit",
        default=True,
        help="Fit what reads the heads and channels that stay to the outputs of all, by least squares.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.blocks or self.heads or self.channels or self.experts):
            raise RecipeError("shrink removes nothing", "Give it blocks, heads, channels or experts")

    @property
    def needs_calibration(self) -> bool:
        return True

    @property
    def label(self) -> str:
        removed = ((name, getattr(self, name)) for name in ("blocks", "heads", "channels", "experts"))
        return f"without-{'-'.join(f'{amount:g}-{name}' for name, amount in removed if amount)}"

    def check_among(self, stages: Sequence[Stage]) -> None:
        super().check_among(stages)
        if stages[0] is not self:
            raise RecipeError("shrink is not the first stage", "Put it first: every other stage works on its result")
