"""Grids and arguments of what draws tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from runtime.kernels.gpu.draw import draw_listed, draw_parts, join_parts
from runtime.sampler.noise import RowNoise
from runtime.sampler.outcomes import FORBIDDEN, INFINITE, UNDECIDED

BLOCK = 2048
"""Tokens of one program: 63 of them share a row of Llama 3's vocabulary."""


def draw_rows(logits: Tensor, scores: Tensor, noise: RowNoise, tokens: Tensor) -> None:
    """Writes the token of each row, or one of the outcomes, to int64 `tokens [R]`. Its launches depend on shapes only
    and wait for nothing, so they can be captured in a graph.

    Args:
        logits: float32 `[R, V]`; a row that is not finite has no token.
        scores: the logits as requests want them, or `logits` itself.
    """
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, BLOCK)
    sums, ids = logits.new_empty(rows, 2, parts), logits.new_empty(rows, parts, dtype=torch.int32)
    draw_parts[(rows, parts)](
        logits, scores, noise.seeds, noise.positions, noise.temperature, sums, ids, vocab_size, parts, BLOCK=BLOCK
    )
    join_parts[(rows,)](sums, ids, noise.temperature, tokens, parts, **join_constants(parts))


def draw_from_listed(
    scores: Tensor, ids: Tensor, unknown: Tensor, is_truncated: Tensor, noise: RowNoise, tokens: Tensor
) -> None:
    """Draws `tokens [R]` of truncated rows that have one again: from listed tokens, and undecided where those are not
    all. As capturable as `draw_rows`.

    Args:
        scores: float32 `[R, K]` of int64 `ids [R, K]`, over temperature; minus infinity where one cannot be drawn.
        unknown, is_truncated: bool `[R]`.
    """
    rows, listed = scores.shape
    draw_listed[(rows,)](
        scores, ids, is_truncated, unknown, noise.seeds, noise.positions, tokens, listed, **listed_constants(listed)
    )


def listed_constants(listed: int) -> dict[str, Any]:
    """What `draw_listed` is compiled for."""
    return {"BLOCK": triton.next_power_of_2(listed), "UNDECIDED": UNDECIDED, "num_warps": 1}


def join_constants(parts: int) -> dict[str, Any]:
    """What `join_parts` is compiled for."""
    outcomes = {"INFINITE": INFINITE, "FORBIDDEN": FORBIDDEN, "UNDECIDED": UNDECIDED}
    return {"BLOCK": triton.next_power_of_2(parts), **outcomes, "num_warps": 1}
