"""Sampling in compiled code gives the tokens of torch, whatever the vocabulary, the scores and the instruction set."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.cpu.binding import best_instruction_set, library, set_threads
from runtime.backends.cpu.layers import CpuSampling, argmax, gumbel_argmax
from runtime.backends.torch.ops import TorchSampling, gumbel_noise
from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.sampling.sampler import Sampler, sample_tokens

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
VOCABULARIES = (1, 5, 64, 65, 1000, 20_001)
ROWS = 40


def scores_of(vocab: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def streams(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (ROWS,), generator=random), torch.randint(
        0, 10_000, (ROWS,), generator=random
    )


def winners(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    return gumbel_noise(seeds, positions, torch.arange(scores.shape[-1])).add_(scores).argmax(-1)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0, 1e20])
def test_the_loudest_token_is_that_of_torch(vocab: int, spread: float, instruction_set: int) -> None:
    scores, (seeds, positions) = scores_of(vocab, spread), streams(vocab)
    if vocab > 64:
        scores[: ROWS // 2, ::3] = -torch.inf
    assert torch.equal(gumbel_argmax(scores, seeds, positions, instruction_set), winners(scores, seeds, positions))


@pytest.mark.parametrize("instruction_set", SETS)
def test_where_rounding_decides_nothing_is_decided(instruction_set: int) -> None:
    scores = scores_of(1000, 1.0)
    scores[:, (3, 700)] = 1e22  # noise vanishes beside them
    scores[5] = -torch.inf
    scores[6, 700] = 0.0
    found = gumbel_argmax(scores, *streams(), instruction_set)
    assert found[6] == 3
    assert bool((found[[row for row in range(ROWS) if row != 6]] == -1).all())


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_peaks_are_the_first_of_the_highest(vocab: int, instruction_set: int) -> None:
    scores = scores_of(vocab, 1.0).bfloat16().float()  # with ties
    scores[3] = -torch.inf
    for row, special in enumerate((torch.nan, torch.inf, -torch.inf)):
        scores[row, vocab * row // 3] = special
    highest, finite = argmax(scores, instruction_set)
    assert finite.tolist() == [False] * 4 + [True] * (ROWS - 4)
    assert torch.equal(highest[1:], scores.argmax(-1)[1:])
    assert 0 <= int(highest[0]) < vocab


def test_tokens_are_the_same_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 3001
    logits, usual = scores_of(vocab, 4.0), SamplingParams()
    mask = bytes(0b10110110 for _ in range((vocab + 7) // 8))
    kinds = (
        usual,
        replace(usual, temperature=0.0),
        replace(usual, temperature=0.6),
        replace(usual, temperature=1e-30),
        replace(usual, top_p=0.9),
        replace(usual, top_k=20, logit_bias=((17, 9.0),)),
    )
    draws = [
        SamplingMetadata(kinds[row % len(kinds)], seed=row, position=row * 3, mask=mask if row % 5 == 0 else None)
        for row in range(ROWS)
    ]
    draws[7] = replace(draws[7], mask=bytes(len(mask)))
    logits[8, 5], logits[9, 6] = torch.nan, torch.inf
    logits[10, 20:40] = 1e4
    assert not CpuSampling().unsupported_reason(logits.device, logits.dtype)
    compiled = sample_tokens(logits, draws)
    assert compiled == Sampler(TorchSampling())(logits, draws)
    assert [bool(token.error) for token in compiled[6:11]] == [False, True, True, True, False]


def test_rows_do_not_depend_on_others_or_on_threads() -> None:
    scores, (seeds, positions) = scores_of(5000, 2.0), streams()
    together = gumbel_argmax(scores, seeds, positions)
    try:
        for threads in (1, 3):
            set_threads(threads)
            assert torch.equal(gumbel_argmax(scores, seeds, positions), together)
            for row in (0, 17):
                one = slice(row, row + 1)
                assert torch.equal(gumbel_argmax(scores[one], seeds[one], positions[one]), together[one])
    finally:
        set_threads(0)


def test_other_numbers_are_left_to_torch_and_columns_may_lie_apart() -> None:
    scores = scores_of(10, 1.0)
    assert CpuSampling().unsupported_reason(scores.device, torch.float64)
    assert torch.equal(argmax(scores[:, ::2])[0], scores[:, ::2].argmax(-1))
    with pytest.raises(ValueError, match="set 7"):
        argmax(scores, 7)
