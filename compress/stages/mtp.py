"""Rounding of the multi-token prediction head, subject to a minimum acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compress.checkpoint.weights import Int
from compress.common.cli import Key, option
from compress.stages.base import STAGES, Stage

PER_CHANNEL = -1


@STAGES.register(order=1)
@dataclass(frozen=True)
class MtpStage(Stage):
    """Rounding of the multi-token prediction head to nearest, after compression of the model's weights."""

    name: ClassVar[str] = "mtp"
    is_single: ClassVar[bool] = True
    added_by: ClassVar[Key | None] = (
        "mtp_bits",
        int | None,
        option(
            default=None,
            metavar="BITS",
            help="Bits of the multi-token prediction head, 2 to 8; applied only if its acceptance rate is at least 95 "
            "% of the dense head's. Default: the head stays dense.",
        ),
    )

    bits: int = option(default=4, help="Bits of a weight, 2 to 8.")
    group_size: int = option(default=128, help="Input columns that share a scale, or -1 for one scale per output row.")
    min_acceptance: float = option(
        default=0.95,
        limits={"above": 0, "at most": 1},
        help="Least acceptance rate, as a share of the dense head's.",
    )
    data: str = option(default="pydoc", help="Text to measure on.")
    tokens: int = option(default=8192, limits={"at least": 3}, help="Tokens of the text.")
    max_seq_length: int = option(default=1024, limits={"at least": 3}, help="Tokens of a window.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.scheme  # raises SchemeError for an invalid scheme

    @property
    def scheme(self) -> Int:
        """Scheme of the linears. Raises SchemeError."""
        return Int(self.bits, None if self.group_size == PER_CHANNEL else self.group_size)

    @property
    def label(self) -> str:
        return f"mtp{self.bits}"
