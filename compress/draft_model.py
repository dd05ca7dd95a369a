"""Draft model for speculative decoding: its memory, and the acceptance rate at which it pays off."""

from __future__ import annotations

from dataclasses import dataclass

from compress.common.errors import ToolkitError
from runtime.core.model_config import DecoderConfig

HALVINGS = 40  # width of the final interval of acceptance rates: below the precision of any measurement


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Model that drafts tokens for a target model."""

    path: str
    config: DecoderConfig
    weight_bytes: int

    def check(self, model: DecoderConfig) -> None:
        """Raises ToolkitError if the vocabulary sizes differ."""
        sizes = self.config.spec.vocab_size, model.spec.vocab_size
        if sizes[0] != sizes[1]:
            raise ToolkitError(
                f"the draft model {self.path} has a vocabulary of {sizes[0]} tokens, and the model one of {sizes[1]}",
                "Draft with a smaller model of the same family, or leave out --draft",
            )


def break_even(draft_bytes: int, step_bytes: int, num_drafts: int) -> float | None:
    """Returns the acceptance rate at which speculative decoding breaks even, assuming equal rates at all positions.

    A verification step of the target model reads as much as a step without drafts. It must therefore yield as many
    tokens as the steps of both models together take times the duration of one target step. Returns None if even
    accepting all draft tokens does not pay off.
    """
    wanted = 1 + num_drafts * draft_bytes / step_bytes
    if wanted > 1 + num_drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        expected = sum(middle**count for count in range(num_drafts + 1))  # Leviathan et al. 2023, equation 1
        low, high = (low, middle) if expected >= wanted else (middle, high)
    return high
