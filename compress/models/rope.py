"""Rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864).

    Attributes:
        type: kind of its frequencies, which needs `options`.
        partial: share of the channels of a head that it rotates, the first ones.
        knows_partial: whether the modeling code of the family reads `partial`.
        interleaved: channels 2i and 2i + 1 are a pair, not i and i + D / 2.
        length: longest sequence that is served; above `short_length` all sequences have its long factors.
    """

    type: str
    theta: float
    options: Mapping[str, Any]
    partial: float = 1.0
    knows_partial: bool = False
    interleaved: bool = False
    length: int = 0

    @property
    def short_length(self) -> int | None:
        """Longest sequence for its short factors; None for a type that has no long ones."""
        return self.options["original_max_position_embeddings"] if self.type == "longrope" else None
