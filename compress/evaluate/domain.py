"""Whether the calibration text is text that the model knows: statistics over gibberish mislead every method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.evaluate.perplexity import Evaluation, evaluate
from compress.evaluate.scorers import Scorer
from compress.evaluate.seen import SeenText
from compress.evaluate.windows import Windows

MAX_RATIO = 2.5
"""Ordinary texts of different kinds differ by less than twice, gibberish or a foreign script by three times or more."""

_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Domain:
    """How well one model predicts two texts, in bits per byte: tokens of different texts stand for different amounts of
    text, bytes do not.

    Attributes:
        calibration: of the first calibration sequences, about 4096 tokens.
        data: of the evaluation text.
    """

    calibration: float
    data: float

    def warnings(self, name: str, data: str) -> tuple[str, ...]:
        """A warning when the calibration text `name` is predicted far worse than the evaluation text `data`."""
        if self.calibration <= MAX_RATIO * self.data:
            return ()
        return (
            f"the dense model needs {self.calibration:.2f} bits per byte for its calibration text {name} and "
            f"{self.data:.2f} for {data}: that text is off the model's domain; calibrate on text like what it will see",
        )


def compare_domains(
    scorer: Scorer, seen: SeenText | None, windows: Windows, result: Evaluation, tokenizer: Any
) -> Domain | None:
    """Scores some of the calibration text; None where it is not at hand.

    Args:
        scorer: the baseline, or without one the model itself.
        result: the evaluation of the same on `windows`.
    """
    if seen is None or seen.tokens is None:
        return None
    tokens = seen.tokens[: max(1, _TOKENS // seen.tokens.shape[1])]
    sample = evaluate(scorer, Windows(tokens, "calibration sequences as they are", seen.name, ""))
    measured = result.baseline_perplexity or result.perplexity
    return Domain(
        math.log2(sample.perplexity) / _bytes_per_token(tokens, tokenizer),
        math.log2(measured) / _bytes_per_token(windows.tokens, tokenizer),
    )


def _bytes_per_token(tokens: Tensor, tokenizer: Any) -> float:
    rows = tokens[: max(1, _TOKENS // tokens.shape[1])]
    num_bytes = sum(len(tokenizer.decode(row, skip_special_tokens=True).encode()) for row in rows)
    return max(num_bytes, 1) / rows.numel()
