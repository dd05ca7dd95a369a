"""Rounding of a head of multi-token prediction, under a gate: how many of its drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.weights import Int
from compress.common.errors import RecipeError

PER_CHANNEL = -1


@dataclass(frozen=True, slots=True)
class MtpStage:
    """Rounding of the head of multi-token prediction to nearest, when the weights of the model are done.

    Attributes:
        bits, group_size: of the linears in the head's block; a group size of -1 is one group per output channel.
        min_acceptance: least acceptance of its drafts, as a share of that of the dense head; below it stays dense.
        data: text to measure on, see `calibration.sources.load_texts`.
        tokens: how many of it.
        max_seq_length: tokens of a window.
    """

    bits: int = 4
    group_size: int = 128
    min_acceptance: float = 0.95
    data: str = "pydoc"
    tokens: int = 8192
    max_seq_length: int = 1024

    def __post_init__(self) -> None:
        _ = self.scheme  # raises SchemeError for what is no scheme
        if not 0 < self.min_acceptance <= 1:
            raise RecipeError(f"min_acceptance={self.min_acceptance} is not above 0 and at most 1", "Use 0.95")
        if min(self.tokens, self.max_seq_length) < 3:
            raise RecipeError("drafts cannot be measured on less than 3 tokens", "Use tokens: 8192")

    @property
    def scheme(self) -> Int:
        """The stored form of the linears. Raises SchemeError."""
        return Int(self.bits, None if self.group_size == PER_CHANNEL else self.group_size)

    @property
    def needs_calibration(self) -> bool:
        return False
