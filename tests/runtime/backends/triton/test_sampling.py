"""Tokens drawn in Triton against those of torch: noise of the same bits, ties, rows that are not finite or forbidden,
ragged vocabularies, and sums that float32 cannot tell apart."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import triton.language as tl
from poisoned_memory import poisoned_allocations
from torch import Tensor

from runtime.backends.backend import FORBIDDEN, INFINITE, UNDECIDED
from runtime.backends.torch.ops import gumbel_noise
from runtime.backends.triton.kernels.sampling import ABSOLUTE, gumbel, sample_rows
from runtime.backends.triton.layers import TritonSampling
from runtime.core.batch import SamplingMetadata, SamplingTensors
from runtime.core.request import SamplingParams
from runtime.sampling.sampler import Sampler

triton = pytest.importorskip("triton")


ROWS = 6
RAGGED = 4999


@triton.jit
def noise_of_words(words_ptr, noise_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(noise_ptr + lane, gumbel(tl.load(words_ptr + lane).to(tl.uint64)))


def scores_of(vocab: int, spread: float, device: torch.device, rows: int = ROWS) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(device)


def noise_of(temperatures: list[float], device: torch.device) -> SamplingTensors:
    random = torch.Generator().manual_seed(len(temperatures))
    seeds = torch.randint(-(2**62), 2**62, (len(temperatures),), generator=random)
    positions = torch.randint(0, 10_000, (len(temperatures),), generator=random)
    temperature = torch.tensor(temperatures, dtype=torch.float64)
    columns = seeds, positions, torch.zeros_like(seeds), temperature, torch.ones_like(temperature), 0 * temperature
    return SamplingTensors(*(column.to(device) for column in columns))


def drawn(scores: Tensor, noise: SamplingTensors, logits: Tensor | None = None) -> list[int]:
    with poisoned_allocations():
        tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
        sample_rows(scores if logits is None else logits, scores, noise, tokens)
    return tokens.tolist()


def sums(scores: Tensor, noise: SamplingTensors) -> Tensor:
    """In float64, as torch's way has them; scores as they are where the temperature is 0."""
    ids = torch.arange(scores.shape[-1], device=scores.device)
    noisy = gumbel_noise(noise.seeds, noise.positions, ids).add_(noise.temper(scores))
    return torch.where(noise.temperature.unsqueeze(-1) > 0, noisy, scores.double())


@pytest.mark.parametrize("vocab", [1, 5, 2048, 2049, RAGGED])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_tokens_are_those_of_torch(gpu, vocab: int, spread: float) -> None:
    scores, noise = scores_of(vocab, spread, gpu), noise_of([0.0, 0.5, 1.0] * (ROWS // 3), gpu)
    if vocab > 5:
        scores[: ROWS // 2, ::3] = -torch.inf
    logits = torch.where(scores.isfinite(), scores, 0.5)
    exact = sums(scores, noise)
    assert drawn(scores, noise, logits) == exact.argmax(-1).tolist()


def test_a_large_vocabulary(gpu) -> None:
    """Vocabulary of Llama 3, in more parts than a warp has threads."""
    scores, noise = scores_of(128_256, 4.0, gpu, rows=1), noise_of([0.8], gpu)
    assert drawn(scores, noise) == sums(scores, noise).argmax(-1).tolist()


def test_the_noise_of_a_word_is_as_close_as_the_kernel_believes(gpu) -> None:
    powers = np.uint64(1) << np.arange(64, dtype=np.uint64)
    few = np.concatenate((powers, ~powers, powers - np.uint64(1), np.uint64(1 << 63) + powers, np.uint64(0) - powers))
    many = np.random.default_rng(0).integers(0, 2**64, 4096 - len(few), dtype=np.uint64)
    words = np.concatenate((few, many))
    exact = -np.log(-np.log(((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52))
    found = torch.full((len(words),), torch.nan, device=gpu)
    noise_of_words[(1,)](torch.from_numpy(words.view(np.int64)).to(gpu), found, BLOCK=len(words))
    assert exact.min() < -3.5
    assert exact.max() > 36
    assert np.abs(found.double().cpu().numpy() - exact).max() < 0.45 * ABSOLUTE.value


def test_of_equal_scores_the_first_wins_without_noise(gpu) -> None:
    scores = scores_of(RAGGED, 1.0, gpu).bfloat16().float()
    scores[:, (7, 2048, RAGGED - 1)] = 9.0
    scores[1, 7] = -torch.inf
    scores[2] = 0.0
    found = drawn(scores, noise_of([0.0] * ROWS, gpu), scores.clamp(min=-1e9))
    assert found == [7, 2048, 0] + [7] * (ROWS - 3)


def test_where_float32_cannot_tell_nothing_is_decided(gpu) -> None:
    scores, noise = scores_of(RAGGED, 1.0, gpu), noise_of([1.0] * (ROWS - 1) + [0.0], gpu)
    scores[:, (3, 4000)] = 1e22  # too large for noise to change
    scores[1, 4000] = 0.0
    assert drawn(scores, noise) == [UNDECIDED, 3] + [UNDECIDED] * (ROWS - 3) + [3]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [1, 4, 5, 7])
def test_sums_next_to_each_other_are_decided_as_in_float64_or_not_at_all(gpu, power: int, sign: int) -> None:
    noise = noise_of([1.0] * ROWS, gpu)
    scores = torch.full((ROWS, 3000), -50.0, device=gpu)
    scores[:, (10, 2500)] = 0
    first, other = sums(scores, noise)[:, (10, 2500)].unbind(1)
    scores[:, 2500] = first - other + sign * 10.0**-power
    right = 2500 if sign > 0 else 10
    # At the verge, 1e-5 apart, the noise of a GPU may be as far off as the kernel allows for.
    allowed = {right} if power < 5 else {UNDECIDED, right} if power == 5 and gpu.type == "cuda" else {UNDECIDED}
    assert set(drawn(scores, noise)) <= allowed


def test_rows_without_a_token_say_why_and_leave_others_alone(gpu) -> None:
    logits, noise = scores_of(RAGGED, 1.0, gpu, rows=9), noise_of([0.0, 1.0, 1.0] * 3, gpu)
    good = drawn(logits, noise)
    for row, special in enumerate((torch.nan, torch.inf, -torch.inf, torch.nan)):
        logits[row, 4321 * row // 3] = special
    logits[4] = torch.nan
    scores = logits.clone()
    scores[:4, 5:] = -torch.inf  # hides what is not finite
    scores[(5, 6), :] = -torch.inf
    scores[7] -= 0.5
    assert drawn(scores, noise, logits) == [INFINITE] * 5 + [FORBIDDEN] * 2 + good[7:]
    assert drawn(logits, noise) == [INFINITE] * 5 + good[5:]


def test_a_row_does_not_depend_on_others(gpu) -> None:
    scores, noise = scores_of(RAGGED, 2.0, gpu), noise_of([0.0, 0.7, 1.0] * (ROWS // 3), gpu)
    together = drawn(scores, noise)
    for row in (0, 5):
        alone = SamplingTensors(*(getattr(noise, each.name)[row : row + 1] for each in fields(noise)))
        assert drawn(scores[row : row + 1], alone) == together[row : row + 1]


def test_the_sampler_gives_the_same_tokens_with_it(gpu) -> None:
    logits, usual = scores_of(2500, 4.0, gpu, rows=14), SamplingParams()
    mask = bytes(0b10110110 for _ in range(2500 // 8 + 1))
    kinds = (
        usual,
        replace(usual, temperature=0.0),
        replace(usual, temperature=0.6),
        replace(usual, temperature=1e-30),
        replace(usual, top_p=0.9),
        replace(usual, top_k=20, logit_bias=((17, 9.0),)),
        replace(usual, temperature=0, top_k=5),
    )
    draws = [
        SamplingMetadata(kinds[row % len(kinds)], seed=row, position=row * 3, mask=mask if row % 5 == 0 else None)
        for row in range(len(logits))
    ]
    draws[9] = replace(draws[9], mask=bytes(len(mask)))
    logits[8, 5], logits[11, 6] = torch.nan, torch.inf
    logits[7, 20:40] = logits[10, 20:40] = 1e22  # float32 does not decide
    ways = {}
    for name, fused in (("torch", None), ("triton", TritonSampling())):
        sample = Sampler(fused=fused)
        plain = [replace(draw, mask=None, sampling=replace(draw.sampling, logit_bias=())) for draw in draws]
        ways[name] = sample(logits, draws), sample(logits, plain)
    assert ways["triton"] == ways["torch"]
    assert [bool(token.error) for token in ways["triton"][0][7:12]] == [False, True, True, False, True]
