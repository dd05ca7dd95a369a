"""DRY penalties for tokens that would continue a repetition. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from runtime.core.dry import DryParams

MAX_REPEATED = 64
"""Tokens beyond `dry_allowed_length` at which the penalty stops growing."""
MAX_PENALTY = 1e6


def dry_penalties(
    params: DryParams, breakers: Collection[int], prompt: Sequence[int], output: Sequence[int]
) -> dict[int, float]:
    """Returns the penalty of each token that would continue a repetition, to subtract from its logit.

    Args:
        breakers: token ids that no repetition reaches across, and that are not penalized.
    """
    tokens = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(output, dtype=np.int64)])
    if params.dry_penalty_last_n > 0:
        tokens = tokens[-params.dry_penalty_last_n :]
    found = repeated_lengths(tokens, breakers, params.dry_allowed_length + MAX_REPEATED)
    allowed = params.dry_allowed_length
    return {
        token: min(params.dry_multiplier * params.dry_base ** (length - allowed), MAX_PENALTY)
        for token, length in found.items()
        if length >= allowed and token not in breakers
    }


def repeated_lengths(tokens: np.ndarray, breakers: Collection[int], longest: int) -> dict[int, int]:
    """Returns by token the length of the longest suffix that it has followed before, at most `longest`.

    Args:
        tokens: int64 `[n]`.
    """
    last = tokens[::-1][:longest].tolist()
    ends = np.arange(len(tokens) - 1)  # of earlier occurrences
    found: dict[int, int] = {}
    for length, token in enumerate(last, start=1):
        if token in breakers:
            break
        ends = ends[ends >= length - 1]
        ends = ends[tokens[ends - (length - 1)] == token]
        if not len(ends):
            break
        found.update(dict.fromkeys(np.unique(tokens[ends + 1]).tolist(), length))
    return found
