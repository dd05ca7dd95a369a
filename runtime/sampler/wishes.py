"""How rows of logits want to be drawn, as columns on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.draws import Draw
from runtime.sampler.noise import RowNoise
from runtime.sampling_params import SamplingParams
from runtime.upload import upload_columns

MIN_TEMPERATURE = 1e-20
"""Lower ones are as good as this: logits over it are further apart than noise reaches, and still finite."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Noise, and what is cut off, `[R]` each: top-k is int64, top-p and min-p are float64."""

    noise: RowNoise
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of_columns(cls, integers: Sequence[Tensor], floats: Sequence[Tensor]) -> Wishes:
        """As `integers_of` and `floats_of` give them."""
        (seeds, positions, top_k), (temperature, top_p, min_p) = integers, floats
        return cls(RowNoise(seeds, positions, temperature), top_k, top_p, min_p)

    @property
    def is_truncated(self) -> Tensor:
        """bool `[R]`, as `SamplingParams.is_truncated`."""
        return (self.noise.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def limits(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """What cuts off scores of a dtype."""
        return self.top_k, self.top_p.to(dtype), self.min_p.to(dtype)


def upload_wishes(draws: Sequence[Draw], rows: Sequence[int], device: torch.device) -> tuple[Tensor, Wishes]:
    """The numbers of some rows, int64 `[R]`, and how these want to be drawn; in one transfer."""
    mine = [draws[row] for row in rows]
    integers = zip(*(integers_of(draw.sampling, draw.seed, draw.position) for draw in mine), strict=True)
    floats = zip(*(floats_of(draw.sampling) for draw in mine), strict=True)
    index, *columns = upload_columns((rows, *integers), tuple(floats), device)
    return index, Wishes.of_columns(columns[:3], columns[3:])


def integers_of(sampling: SamplingParams, seed: int, position: int) -> tuple[int, int, int]:
    return seed, position, sampling.top_k


def floats_of(sampling: SamplingParams) -> tuple[float, float, float]:
    """Of temperatures only 0 is greedy."""
    temperature = max(sampling.temperature, MIN_TEMPERATURE) if sampling.temperature > 0 else 0.0
    return temperature, sampling.top_p, sampling.min_p
