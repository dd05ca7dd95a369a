"""The token of each row of logits: that of the highest score, or of the highest sum of score and Gumbel noise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.backend import FORBIDDEN, INFINITE, UNDECIDED, Candidates
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.sizes import cdiv, next_power_of_2
from runtime.core.batch import SamplingTensors

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
"""Constants of SplitMix64, see `runtime.backends.torch.ops`."""
ABSOLUTE, RELATIVE = tl.constexpr(1e-5), tl.constexpr(1e-6)
"""Sums further apart than this are ordered alike in float64. Noise is wrong by less than 4.5e-6, most of which is one
unit in the last place of a logarithm of up to 37 (CUDA's mathematical functions: `logf`)."""
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def mix(word):
    """SplitMix64's finalizer of uint64."""
    word = (word ^ (word >> 30)) * FIRST
    word = (word ^ (word >> 27)) * SECOND
    return word ^ (word >> 31)


@triton.jit
def gumbel(word):
    """`-ln(-ln u)` in float32, where u is what `gumbel_noise` makes of the upper 52 bits of `word`.

    Of u and 1 - u the smaller one, which float32 holds well, is `least`; -ln(1 - x) is 2 artanh(x / (2 - x)), a series
    that after 7 terms lacks less than 2^-24 of itself.
    """
    bits = word >> 12
    other = 0xFFFFFFFFFFFFF - bits
    least = (tl.minimum(bits, other).to(tl.float32) + 0.5) * 2.220446049250313e-16
    x = least / (2.0 - least)
    y = x * x
    series = 1 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13))))))
    return -tl.log(tl.where(bits < other, -tl.log(least), 2 * x * series))


@triton.jit
def noise_at(row, ids, seeds_ptr, positions_ptr):
    """Noise of the tokens `ids` of a row, in float32."""
    seed, position = tl.load(seeds_ptr + row).to(tl.uint64), tl.load(positions_ptr + row).to(tl.uint64)
    stream = mix(mix(seed + GAMMA) ^ ((position + 1) * GAMMA))
    return gumbel(mix(stream + (ids + 1).to(tl.uint64) * GAMMA))


@triton.jit
def are_close(highest, second):
    """Whether sums are closer than float32 can tell."""
    return highest - second <= ABSOLUTE + RELATIVE * tl.abs(highest)


@Launcher
@triton.jit(
    do_not_specialize=["PARTS"], do_not_specialize_on_alignment=["seeds_ptr", "positions_ptr", "temperature_ptr"]
)
def sample_parts(
    logits_ptr, scores_ptr, seeds_ptr, positions_ptr, temperature_ptr, sums_ptr, ids_ptr, V, PARTS,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For each part of a row, BLOCK tokens, writes the two highest sums to `sums [R, 2, PARTS]` and the first token
    with the highest one to `ids [R, PARTS]`. The highest sum is NaN where a logit is not finite. Programs (row, part).

    Where the temperature is 0 the scores are the sums.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=0.0)
    sums = tl.load(scores_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    if temperature > 0:
        sums = tl.div_rn(sums, temperature) + noise_at(row, ids, seeds_ptr, positions_ptr)
    highest = tl.max(sums, 0)
    token = tl.min(tl.where(sums == highest, ids, NO_TOKEN), 0)
    second = tl.max(tl.where(ids == token, float("-inf"), sums), 0)
    has_infinite = tl.max((tl.abs(logits) < float("inf")).to(tl.int32) ^ 1, 0) > 0
    place = row * PARTS + part
    tl.store(ids_ptr + place, token)
    tl.store(sums_ptr + place + row * PARTS, tl.where(has_infinite, float("nan"), highest))
    tl.store(sums_ptr + place + (row + 1) * PARTS, second)


@Launcher
@triton.jit(do_not_specialize=["PARTS"], do_not_specialize_on_alignment=["temperature_ptr", "tokens_ptr"])
def join_parts(
    sums_ptr, ids_ptr, temperature_ptr, tokens_ptr, PARTS, BLOCK: tl.constexpr,
    INFINITE: tl.constexpr, FORBIDDEN: tl.constexpr, UNDECIDED: tl.constexpr,
):  # fmt: skip
    """The token of each row from its parts, or one of the outcomes, to int64 `tokens [R]`. BLOCK is at least PARTS."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = part < PARTS
    sums = tl.load(sums_ptr + row * 2 * PARTS + part, mask=inside, other=float("-inf"))
    seconds = tl.load(sums_ptr + (row * 2 + 1) * PARTS + part, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * PARTS + part, mask=inside, other=NO_TOKEN)
    highest = tl.max(sums, 0)
    token = tl.min(tl.where(sums == highest, ids, NO_TOKEN), 0)
    second = tl.max(tl.where(ids == token, seconds, sums), 0)
    is_random = tl.load(temperature_ptr + row) > 0
    token = tl.where(is_random & are_close(highest, second), UNDECIDED, token)
    token = tl.where(highest == float("-inf"), FORBIDDEN, token)
    token = tl.where(tl.max((sums != sums).to(tl.int32), 0) > 0, INFINITE, token)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@Launcher
@triton.jit(
    do_not_specialize=["K"],
    do_not_specialize_on_alignment=["truncated_ptr", "unknown_ptr", "seeds_ptr", "positions_ptr", "tokens_ptr"],
)
def sample_listed_kernel(
    scores_ptr, ids_ptr, truncated_ptr, unknown_ptr, seeds_ptr, positions_ptr, tokens_ptr, K,
    BLOCK: tl.constexpr, UNDECIDED: tl.constexpr,
):  # fmt: skip
    """Replaces the token of each truncated row that has one by that of K tokens `ids [R, K]` with the highest sum of
    `scores [R, K]` and noise; where a row has unknown tokens other than these, by UNDECIDED. BLOCK is at least K."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row * K + place, mask=place < K, other=NO_TOKEN)
    scores = tl.load(scores_ptr + row * K + place, mask=place < K, other=float("-inf"))
    sums = scores + noise_at(row, ids, seeds_ptr, positions_ptr)
    highest = tl.max(sums, 0)
    token = tl.min(tl.where(sums == highest, ids, NO_TOKEN), 0)
    second = tl.max(tl.where(ids == token, float("-inf"), sums), 0)
    token = tl.where(tl.load(unknown_ptr + row) | are_close(highest, second), UNDECIDED, token)
    before = tl.load(tokens_ptr + row)
    tl.store(tokens_ptr + row, tl.where(tl.load(truncated_ptr + row) & (before >= 0), token, before))


BLOCK = 2048
"""Tokens of one program: 63 of them share a row of Llama 3's vocabulary."""


def sample_rows(logits: Tensor, scores: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
    """Writes the token of each row, or one of the outcomes, to int64 `tokens [R]`. Its launches depend on shapes only
    and wait for nothing, so they can be captured in a graph.

    Args:
        logits: float32 `[R, V]`; a row that is not finite has no token.
        scores: the logits as requests want them, or `logits` itself.
    """
    rows, vocab_size = logits.shape
    parts = cdiv(vocab_size, BLOCK)
    sums, ids = logits.new_empty(rows, 2, parts), logits.new_empty(rows, parts, dtype=torch.int32)
    sample_parts[(rows, parts)](
        logits, scores, tensors.seeds, tensors.positions, tensors.temperature, sums, ids, vocab_size, parts, BLOCK=BLOCK
    )
    outcomes = {"INFINITE": INFINITE, "FORBIDDEN": FORBIDDEN, "UNDECIDED": UNDECIDED}
    block = next_power_of_2(parts)
    join_parts[(rows,)](sums, ids, tensors.temperature, tokens, parts, BLOCK=block, **outcomes, num_warps=1)


def sample_from_listed(listed: Candidates, is_truncated: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
    """Draws `tokens [R]` of truncated rows that have one again: from listed tokens, and undecided where those are not
    all. As capturable as `sample_rows`.

    Args:
        listed: with float32 scores.
        is_truncated: bool `[R]`.
    """
    rows, num_listed = listed.scores.shape
    sample_listed_kernel[(rows,)](
        listed.scores, listed.ids, is_truncated, listed.unknown, tensors.seeds, tensors.positions, tokens, num_listed,
        BLOCK=next_power_of_2(num_listed), UNDECIDED=UNDECIDED, num_warps=1,
    )  # fmt: skip
