"""Tokens of all rows of a step on an NVIDIA GPU: two launches where nobody wants top-k, top-p or min-p.

Nothing waits for the GPU, so this can be the end of a recorded step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from runtime.backends.triton.device import refuse_device
from runtime.sampling.logits_processors import likely_candidates
from runtime.sampling.sampling_tensors import Wishes

DrawStep = Callable[[Tensor, Tensor, Wishes, bool, Tensor], None]
"""As `draw_step`."""


def gpu_draw(logits: Tensor) -> DrawStep | None:
    """What draws from logits like these in Triton: from float32 on a GPU, rows side by side. None from others."""
    if refuse_device(logits.device) or logits.dtype != torch.float32 or not logits.is_contiguous():
        return None
    return draw_step


def draw_step(logits: Tensor, scores: Tensor, wishes: Wishes, truncates: bool, tokens: Tensor) -> None:
    """Writes the token of each row, or one of `outcomes`, to int64 `tokens [R]`.

    Args:
        logits: float32 `[R, V]`.
        scores: the logits as requests want them, or `logits` itself.
        truncates: whether some rows want top-k, top-p or min-p.
    """
    from runtime.backends.triton.kernels.sampling import draw_from_listed, draw_rows

    noise = wishes.noise
    if not truncates:
        draw_rows(logits, scores, noise, tokens)
        return
    is_truncated = wishes.is_truncated
    draw_rows(logits, scores, replace(noise, temperature=noise.temperature.masked_fill(is_truncated, 0)), tokens)
    likely, ids, unknown = likely_candidates(noise.temper(scores), *wishes.limits(scores.dtype))
    draw_from_listed(likely, ids, unknown, is_truncated, noise, tokens)
