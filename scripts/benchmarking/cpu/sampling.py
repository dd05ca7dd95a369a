"""Sampling of rows of logits in compiled code compared with plain torch, in turns on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarking.tables import Row
from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.sampling.sampler import Sampler, choose_sampler

SPREAD = 2.0
"""Standard deviation of the logits."""
HISTORY = 1000
"""Tokens that penalties count."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9, temperature 0.7": {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "min-p 0.05": {"min_p": 0.05},
    "greedy, logprobs 5": {"temperature": 0, "logprobs": 5},
    "temperature 0.8, grammar": {"temperature": 0.8},
    "temperature 0.8, penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


def sampling_rows(vocab: int, numbers_of_rows: Sequence[int], dtype: torch.dtype, seconds: float) -> list[Row]:
    """One line per kind of draw: milliseconds of processor time for a row of logits in torch, compiled, and the ratio.

    Args:
        seconds: for each kind and number of rows; at least three turns are made.
    """
    table: list[Row] = []
    for name in KINDS:
        row = {"draw": name}
        for rows in numbers_of_rows:
            before, after = _milliseconds(name, torch.randn(rows, vocab).mul_(SPREAD).to(dtype), seconds)
            gain = statistics.median(old / new for old, new in zip(before, after, strict=True))
            times = [statistics.median(each) / rows for each in (before, after)]
            row[f"R={rows}"] = f"{times[0]:.2f} to {times[1]:.2f} ({gain:.1f}x)"
        table.append(row)
    return table


def _milliseconds(name: str, logits: Tensor, seconds: float) -> tuple[list[float], list[float]]:
    """Times steps in torch and in compiled code, in turns, and leaves out the first of each."""
    samplers = Sampler(), choose_sampler(logits.device, torch.float32)
    taken: tuple[list[float], list[float]] = ([], [])
    deadline = time.monotonic() + seconds
    while len(taken[0]) < 4 or time.monotonic() < deadline:
        draws = _draws(name, *logits.shape, position=len(taken[0]))
        for sampler, times in zip(samplers, taken, strict=True):
            begin = time.thread_time()
            sampler(logits.float(), draws)
            times.append(1e3 * (time.thread_time() - begin))
    return taken[0][1:], taken[1][1:]


def _draws(name: str, rows: int, vocab: int, position: int) -> list[SamplingMetadata]:
    params = SamplingParams(**KINDS[name])
    mask = b"\xb5" * (vocab // 8) if "grammar" in name else None
    output = [number % vocab for number in range(HISTORY)] if params.has_penalties else []
    return [SamplingMetadata(params, row, position, output, output, mask) for row in range(rows)]
