"""Gumbel noise that is a pure function of (seed, position, token id): the whole secret of reproducible sampling.

Adding Gumbel noise to log-probabilities and taking the largest draws from the distribution exactly. Because the noise
of a token depends on nothing but its request's seed, its position in the sequence and its id, a seed gives the same
tokens whatever the batch, the chunking, preemption or speculation, on any device.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) in wrapping
int64 arithmetic: its finalizer turns (seed, position) into the state of a stream, and the token id is the index in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.core.batch import upload_columns
from runtime.core.request import SamplingParams
from runtime.core.step import SamplingMetadata


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
UNIFORM_BITS = 52


@dataclass(frozen=True, slots=True)
class RowNoise:
    """Noise stream of each row, and the temperature that divides scores before noise is added; `[R]` each.

    Attributes:
        seeds, positions: int64, as `gumbel_noise` takes them.
        temperature: float64; 0 where there is no noise, and the highest score wins.
    """

    seeds: Tensor
    positions: Tensor
    temperature: Tensor

    def temper(self, scores: Tensor) -> Tensor:
        """Scores `[R, V]` over temperature, where none is 0."""
        return scores / self.temperature.to(scores.dtype).unsqueeze(-1)

    def gumbel_argmax(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """The id `[R]` with the highest sum of score `[R, K]` and noise, the first of equal ones; ids `[R or 1, K]`."""
        winner = gumbel_noise(self.seeds, self.positions, token_ids).add_(scores).argmax(-1, keepdim=True)
        return token_ids.expand(len(scores), -1).gather(-1, winner).squeeze(-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64.

    Args:
        seeds, positions: int64 `[R]`, one stream per row; position is the one the drawn token will have.
        token_ids: int64 `[V]` or `[R, V]`.

    Returns:
        `[R, V]`, between about -3.6 and 36.7.
    """
    streams = _mix(_mix(seeds + GAMMA).bitwise_xor_((positions + 1) * GAMMA))
    words = _mix(streams.unsqueeze(-1) + (token_ids + 1) * GAMMA)
    # 52 bits and a half: never 0 nor 1, and exact in float64.
    uniform = _shift_right_(words, 64 - UNIFORM_BITS).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64-bit words in which every input bit moves half of the output bits.
    Overwrites `words`: with a large vocabulary, new memory would cost more than the arithmetic."""
    words.bitwise_xor_(_shift_right_(words.clone(), 30)).mul_(MULTIPLIERS[0])
    words.bitwise_xor_(_shift_right_(words.clone(), 27)).mul_(MULTIPLIERS[1])
    return words.bitwise_xor_(_shift_right_(words.clone(), 31))


def _shift_right_(words: Tensor, bits: int) -> Tensor:
    """Logical shift in place; torch's shift of int64 copies the sign."""
    return words.bitwise_right_shift_(bits).bitwise_and_((1 << (64 - bits)) - 1)


MIN_TEMPERATURE = 1e-20
"""Lower ones are as good as this: logits over it are further apart than noise reaches, and still finite."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Noise, and what is cut off, `[R]` each: top-k is int64, top-p and min-p are float64."""

    noise: RowNoise
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of_columns(cls, integers: Sequence[Tensor], floats: Sequence[Tensor]) -> SamplingTensors:
        """As `integers_of` and `floats_of` give them."""
        (seeds, positions, top_k), (temperature, top_p, min_p) = integers, floats
        return cls(RowNoise(seeds, positions, temperature), top_k, top_p, min_p)

    @property
    def is_truncated(self) -> Tensor:
        """bool `[R]`, as `SamplingParams.is_truncated`."""
        return (self.noise.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def limits(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k, top-p and min-p in the dtype of scores."""
        return self.top_k, self.top_p.to(dtype), self.min_p.to(dtype)


def upload_sampling_tensors(
    draws: Sequence[SamplingMetadata], rows: Sequence[int], device: torch.device
) -> tuple[Tensor, SamplingTensors]:
    """The numbers of some rows, int64 `[R]`, and how these want to be drawn; in one transfer."""
    mine = [draws[row] for row in rows]
    integers = zip(*(integers_of(draw.sampling, draw.seed, draw.position) for draw in mine), strict=True)
    floats = zip(*(floats_of(draw.sampling) for draw in mine), strict=True)
    index, *columns = upload_columns((rows, *integers), tuple(floats), device)
    return index, SamplingTensors.of_columns(columns[:3], columns[3:])


def integers_of(sampling: SamplingParams, seed: int, position: int) -> tuple[int, int, int]:
    return seed, position, sampling.top_k


def floats_of(sampling: SamplingParams) -> tuple[float, float, float]:
    """Temperature, top-p and min-p; only temperature 0 is greedy."""
    temperature = max(sampling.temperature, MIN_TEMPERATURE) if sampling.temperature > 0 else 0.0
    return temperature, sampling.top_p, sampling.min_p


INFINITE, FORBIDDEN, UNDECIDED = -1, -2, -3
"""Instead of a token: nothing can be drawn, or another look at the row is needed to say which one it is."""
ERRORS = {
    INFINITE: "the model's logits are not finite (NaN or infinity)",
    FORBIDDEN: "the grammar allows no token here",
}
