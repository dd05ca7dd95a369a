"""The token of each row of which nothing is cut off: the highest score, or the highest sum of score and noise. In
compiled code where that is there, else in torch; `sampler.gpu` has it in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.draws import Draw
from runtime.sampler import native
from runtime.sampler.noise import RowNoise
from runtime.sampler.outcomes import FORBIDDEN, INFINITE, UNDECIDED
from runtime.sampler.wishes import upload_wishes


def draw_untruncated(logits: Tensor, scores: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> Tensor:
    """int64 `[R]`: the token of each row, or one of `outcomes`.

    Args:
        scores: the logits `[R, V]` as requests want them, or `logits` itself.
        rows: that get noise; in others the highest score wins.
    """
    is_native = native.is_native(logits)
    find_peaks = native.find_peaks if is_native else _find_peaks
    tokens, finite = find_peaks(scores)
    if rows:
        index, wishes = upload_wishes(draws, rows, scores.device)
        tempered = wishes.noise.temper(scores if len(rows) == len(draws) else scores.index_select(0, index))
        tokens.index_copy_(0, index, _find_winners(tempered, wishes.noise, is_native))
    if scores is not logits:
        tokens.masked_fill_(scores.amax(-1) == float("-inf"), FORBIDDEN)
        finite = find_peaks(logits)[1]
    return tokens.masked_fill_(~finite, INFINITE)


def _find_peaks(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As `native.find_peaks`."""
    return scores.argmax(-1), scores.sum(-1).isfinite()  # a sum is finite only if all of its terms are


def _find_winners(tempered: Tensor, noise: RowNoise, is_native: bool) -> Tensor:
    """int64 `[R]`: the tokens with the highest sums of finite scores and noise, or `UNDECIDED`."""
    if is_native:
        winners = native.find_winners(tempered, noise.seeds, noise.positions)
        return winners.masked_fill_(winners < 0, UNDECIDED)
    return noise.loudest(tempered, torch.arange(tempered.shape[-1], device=tempered.device).unsqueeze(0))
