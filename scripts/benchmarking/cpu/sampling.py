"""Sampling of rows of logits in compiled code compared with plain torch, in turns on one core."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarking.machine import median_ratio, take_turns
from benchmarking.tables import Row
from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.sampling.sampler import Sampler, choose_sampler

SPREAD = 2.0
"""Standard deviation of the logits."""
TURNS = 8
"""Draws that take turns."""
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
            taken = take_turns(_ways(name, torch.randn(rows, vocab).mul_(SPREAD).to(dtype)), seconds)
            before, after = (statistics.median(each) / rows for each in taken.values())
            row[f"R={rows}"] = f"{before:.2f} to {after:.2f} ({median_ratio(*taken.values()):.1f}x)"
        table.append(row)
    return table


def _ways(name: str, logits: Tensor) -> dict[str, Callable[[int], object]]:
    draws = [_draws(name, *logits.shape, position=position) for position in range(TURNS)]
    plain, compiled = Sampler(), choose_sampler(logits.device, torch.float32)
    return {
        "torch": lambda turn: plain(logits.float(), draws[turn % TURNS]),
        "compiled": lambda turn: compiled(logits.float(), draws[turn % TURNS]),
    }


def _draws(name: str, rows: int, vocab: int, position: int) -> list[SamplingMetadata]:
    params = SamplingParams(**KINDS[name])
    mask = b"\xb5" * (vocab // 8) if "grammar" in name else None
    output = [number % vocab for number in range(HISTORY)] if params.has_penalties else []
    return [SamplingMetadata(params, row, position, output, output, mask) for row in range(rows)]
