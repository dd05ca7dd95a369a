"""What makes guesses, as the engine sees it. No torch."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Protocol

from runtime.types import Sequence

Wish = tuple[Sequence, int]
"""A sequence that decodes in the next step, and how many tokens to guess for it at most; 0 is none."""


class Drafter(Protocol):
    """Guesses how sequences go on. A wrong guess costs time and never changes a token (see `runtime.verification`)."""

    def propose(self, wishes: ListOf[Wish]) -> None:
        """Sets `draft_token_ids` of every sequence of `wishes`; fewer than wished for, or none, is fine.

        Whatever the drafter keeps for a sequence it may forget when that sequence is not among them any more.
        """
        ...
