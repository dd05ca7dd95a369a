"""Calibration text sampled from the model itself (data-free, arXiv 2305.17888, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from compress.common.errors import NumericsError


@torch.inference_mode()
def sample_sequences(
    model: Any,
    count: int,
    length: int,
    *,
    start: int | None,
    ends: Collection[int] = (),
    seed: int = 0,
    batch: int = 32,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Samples `count` sequences of exactly `length` tokens at temperature 1.

    Every sequence begins with `start`. Where the model ends a text, `start` stands instead of the end token, as between
    the documents of packed text, and a new text begins.

    Args:
        model: a transformers causal language model.
        start: the token before each text; None draws the first token of each sequence from the whole vocabulary.
        ends: tokens that end a text.
        batch: sequences at a time; the result depends on it as on the seed.
        on_progress: called with (tokens done, tokens in all).

    Returns:
        int64 `[count, length]` on the CPU.

    Raises:
        NumericsError: the model gave NaN or infinite logits.
    """
    pieces = []
    for first in range(0, count, batch):
        size = min(batch, count - first)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + first)
        rows = _begin(model, size, start, generator)
        cache, latest = None, rows
        columns = [rows]
        for step in range(1, length):
            output = model(latest.to(model.device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            latest = _draw(output.logits[:, -1], generator)
            if start is not None:
                latest[torch.isin(latest, torch.tensor(list(ends), dtype=torch.int64))] = start
            columns.append(latest)
            on_progress(first * length + size * (step + 1), count * length)
        pieces.append(torch.cat(columns, dim=1))
    return torch.cat(pieces)


def _begin(model: Any, size: int, start: int | None, generator: torch.Generator) -> Tensor:
    if start is not None:
        return torch.full((size, 1), start, dtype=torch.int64)
    return torch.randint(model.config.vocab_size, (size, 1), generator=generator)


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Samples one token per row, `[B, 1]`, on the CPU: its generator gives the same draws on every machine."""
    if not torch.isfinite(logits).all():
        raise NumericsError("the source model gave NaN or infinite logits", "Calibrate on a text instead of self")
    return torch.multinomial(logits.float().cpu().softmax(-1), 1, generator=generator)
