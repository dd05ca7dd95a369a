"""Rounding of the multi-token prediction head, subject to a minimum acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.weights import Int
from compress.common.errors import RecipeError

PER_CHANNEL = -1


@dataclass(frozen=True, slots=True)
class MtpStage:
    """Rounding of the multi-token prediction head to nearest, after compression of the model's weights.

    Attributes:
        bits, group_size: bits and group size of the linears in the head's block; -1 is one group per output channel.
        min_acceptance: minimum acceptance rate relative to the dense head; below it the head stays dense.
        data: text to measure on, see `calibration.sources.load_texts`.
        tokens: number of tokens of the text.
        max_seq_length: tokens per window.
    """

    bits: int = 4
    group_size: int = 128
    min_acceptance: float = 0.95
    data: str = "pydoc"
    tokens: int = 8192
    max_seq_length: int = 1024

    def __post_init__(self) -> None:
        _ = self.scheme  # raises SchemeError for an invalid scheme
        if not 0 < self.min_acceptance <= 1:
            raise RecipeError(f"min_acceptance={self.min_acceptance} is not above 0 and at most 1", "Use 0.95")
        if min(self.tokens, self.max_seq_length) < 3:
            raise RecipeError("drafts cannot be measured on less than 3 tokens", "Use tokens: 8192")

    @property
    def scheme(self) -> Int:
        """Scheme of the linears. Raises SchemeError."""
        return Int(self.bits, None if self.group_size == PER_CHANNEL else self.group_size)

    @property
    def needs_calibration(self) -> bool:
        return False
