"""Whether the calibration text is text that the model knows: statistics over gibberish mislead every method."""

from __future__ import annotations

import math

from compress.evaluate.perplexity import Evaluation, evaluate
from compress.evaluate.scorers import Scorer
from compress.evaluate.seen import SeenText
from compress.evaluate.windows import Windows

MAX_GAP = 2.0
"""Nats per token. Between ordinary texts of different kinds a model's loss differs by about 1; over text of a language
or format that it was not trained on it is larger by far more."""

_TOKENS = 4096


def calibration_perplexity(scorer: Scorer, seen: SeenText | None) -> float | None:
    """Perplexity of a model on the first calibration sequences, about 4096 tokens; None where they are not at hand."""
    if seen is None or seen.tokens is None:
        return None
    tokens = seen.tokens[: max(1, _TOKENS // seen.tokens.shape[1])]
    return evaluate(scorer, Windows(tokens, "calibration sequences as they are", seen.name, "")).perplexity


def off_domain(calibration: float | None, result: Evaluation, seen: SeenText | None, data: str) -> tuple[str, ...]:
    """A warning when the model predicts its calibration text far worse than the evaluation text.

    Args:
        calibration: what `calibration_perplexity` gave for the baseline, or without one for the model itself.
        data: name of the evaluation text.
    """
    measured = result.baseline_perplexity or result.perplexity
    if calibration is None or seen is None or math.log(calibration / measured) <= MAX_GAP:
        return ()
    return (
        f"the model's perplexity on its calibration text {seen.name} is {calibration:,.0f}, on {data} {measured:,.0f}: "
        "that text is off the model's domain; calibrate on text like what it will see",
    )
