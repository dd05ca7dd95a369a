"""Tokens of all rows of a step on an NVIDIA GPU: two launches where nobody wants top-k, top-p or min-p.

Nothing waits for the GPU, so this can be the end of a recorded step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from runtime.kernels.triton_device import refuse_device
from runtime.sampler.noise import RowNoise
from runtime.sampler.truncation import draw_likely
from runtime.sampler.wishes import Wishes

DrawRows = Callable[[Tensor, Tensor, RowNoise, Tensor], None]
"""`runtime.kernels.gpu.launch_draw.draw_rows`."""
DrawStep = Callable[[Tensor, Tensor, Wishes, bool, Tensor], None]
"""From logits `[R, V]`, the same as requests want them, wishes, and whether some of these truncate, to tokens or
`outcomes`: int64 `[R]`."""


def gpu_draw(logits: Tensor) -> DrawStep | None:
    """What draws from logits like these in Triton: from float32 on a GPU, rows side by side. None from others."""
    if refuse_device(logits.device) or logits.dtype != torch.float32 or not logits.is_contiguous():
        return None
    from runtime.kernels.gpu.launch_draw import draw_rows

    return partial(draw_step, draw_rows)


def draw_step(
    draw_rows: DrawRows, logits: Tensor, scores: Tensor, wishes: Wishes, truncates: bool, tokens: Tensor
) -> None:
    """See `DrawStep`."""
    if not truncates:
        draw_rows(logits, scores, wishes.noise, tokens)
        return
    noise, is_truncated = wishes.noise, wishes.is_truncated
    untruncated = RowNoise(noise.seeds, noise.positions, noise.temperature.masked_fill(is_truncated, 0))
    draw_rows(logits, scores, untruncated, tokens)
    tokens.copy_(torch.where(is_truncated & (tokens >= 0), draw_likely(scores, wishes), tokens))
