"""A draft model that a memory must hold beside a model: what it takes, and when it pays."""

from __future__ import annotations

from dataclasses import dataclass

from compress.common.errors import ToolkitError
from runtime.core.model_config import DecoderConfig

HALVINGS = 40  # of an interval of acceptances: below any rate that can be measured


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts the tokens of another.

    Attributes:
        path: as it was typed.
        weight_bytes: of its files.
    """

    path: str
    config: DecoderConfig
    weight_bytes: int

    def check(self, model: DecoderConfig) -> None:
        """Raises ToolkitError for a vocabulary of another size."""
        sizes = self.config.vocab_size, model.vocab_size
        if sizes[0] != sizes[1]:
            raise ToolkitError(
                f"the draft model {self.path} has a vocabulary of {sizes[0]} tokens, and the model one of {sizes[1]}",
                "Draft with a smaller model of the same family, or leave out --draft",
            )


def break_even(draft_bytes: int, step_bytes: int, num_drafts: int) -> float | None:
    """Least part of drafts that must be accepted so that drafting is no loss, each as likely as the one before.

    A step that verifies reads as much as one without drafts, so it must give as many tokens as `num_drafts` steps of
    the draft model and one of the model take times as long.

    Args:
        draft_bytes: that a step of the draft model reads.
        step_bytes: that a step of the model reads.

    Returns:
        None where even all drafts are too few.
    """
    wanted = 1 + num_drafts * draft_bytes / step_bytes
    if wanted > 1 + num_drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _expected_tokens(middle, num_drafts) >= wanted else (middle, high)
    return high


def _expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens of one step with drafts (Leviathan et al. 2023, equation 1)."""
    return sum(acceptance**count for count in range(num_drafts + 1))
