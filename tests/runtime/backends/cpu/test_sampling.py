"""Sampling in compiled code gives the tokens of torch, whatever the vocabulary, the logits and the instruction set."""

from dataclasses import replace

import pytest
import torch
from covering import sample
from torch import Tensor

from compress.cpu.binding import best_instruction_set, library, set_threads
from runtime.backends.backend import FORBIDDEN, INFINITE, UNDECIDED
from runtime.backends.cpu.sampling import CpuSampling
from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.sampling.sampler import Sampler, choose_sampler, draw_tokens, sample_tokens

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
VOCABULARIES = (1, 5, 64, 65, 1000, 20_001)
ROWS = 40
USUAL = SamplingParams()
KINDS = (
    USUAL,
    replace(USUAL, temperature=0.0),
    replace(USUAL, temperature=0.6),
    replace(USUAL, temperature=1e-30),
    replace(USUAL, top_k=20),
    replace(USUAL, top_k=700, temperature=1.7),
    replace(USUAL, top_p=0.9),
    replace(USUAL, top_p=0.2, temperature=3.0),
    replace(USUAL, top_p=0.9999, min_p=1e-6),
    replace(USUAL, min_p=0.1),
    replace(USUAL, min_p=1.0),
    replace(USUAL, top_k=9, top_p=0.7, min_p=0.01),
    replace(USUAL, top_k=10**6, top_p=0.5),
)
PENALTIES = replace(USUAL, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.7)
BIASES = replace(USUAL, logit_bias=((3, 9.0), (0, -100.0), (3, 0.5)))


def logits_of(vocab: int, spread: float, rows: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draws_of(kinds: tuple[SamplingParams, ...], rows: int = ROWS) -> list[SamplingMetadata]:
    return [
        SamplingMetadata(kinds[row % len(kinds)], seed=row * 2**40 - 7, position=row * 3 + len(kinds))
        for row in range(rows)
    ]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0, 1e20])
def test_tokens_are_those_of_torch(vocab: int, spread: float, instruction_set: int) -> None:
    logits, draws = logits_of(vocab, spread), draws_of(KINDS)
    found = CpuSampling(instruction_set).sample(logits, draws).tolist()
    wanted = [token.token_id for token in Sampler()(logits, draws)]
    assert [token for token in found if token != UNDECIDED] == [
        token for token, own in zip(wanted, found, strict=True) if own != UNDECIDED
    ]
    if 0 < spread < 1e20:
        assert found.count(UNDECIDED) <= 1
    assert [token.token_id for token in Sampler(CpuSampling(instruction_set))(logits, draws)] == wanted


@pytest.mark.parametrize("seed", sample(range(100), quick=2))
@pytest.mark.parametrize("spread", [0.3, 1.5, 4.0])
def test_tokens_of_many_rows_with_ties(spread: float, seed: int) -> None:
    logits = logits_of(20_000, spread, 160, seed).bfloat16().float()
    draws = [replace(draw, seed=seed) for draw in draws_of(KINDS, 160)]
    assert sample_tokens(logits, draws) == Sampler()(logits, draws)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.3}, {"top_k": 200}, {"min_p": 0.01}])
def test_few_rows_are_left_undecided(options: dict[str, float]) -> None:
    rows = 2000
    logits, draws = logits_of(1000, 2.0, rows), draws_of((replace(USUAL, **options),), rows)
    found = CpuSampling().sample(logits, draws)
    decided = found != UNDECIDED
    assert decided.sum() >= rows - 4
    assert torch.equal(found[decided], draw_tokens(logits, draws, truncated=True)[decided])


@pytest.mark.parametrize("instruction_set", SETS)
def test_where_rounding_decides_nothing_is_decided(instruction_set: int) -> None:
    logits = logits_of(1000, 1.0)
    logits[:, (3, 700)] = 1e22  # too large for noise to change
    logits[6, 700] = 0.0
    found = CpuSampling(instruction_set).sample(logits, draws_of((USUAL,))).tolist()
    assert found == [UNDECIDED] * 6 + [3] + [UNDECIDED] * (ROWS - 7)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy_takes_the_first_of_the_highest(vocab: int, instruction_set: int) -> None:
    logits = logits_of(vocab, 1.0).bfloat16().float()  # with ties
    logits[3] = -torch.inf
    for row, special in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row, vocab * row // 3] = special
    found = CpuSampling(instruction_set).sample(logits, draws_of((replace(USUAL, temperature=0.0),)))
    assert found[:4].tolist() == [INFINITE] * 4
    assert torch.equal(found[4:], logits.argmax(-1)[4:])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_changes_of_logits_are_those_of_torch(vocab: int, instruction_set: int) -> None:
    logits = logits_of(vocab, 3.0)
    kinds = (*KINDS, PENALTIES, BIASES, replace(PENALTIES, temperature=0.0, logit_bias=BIASES.logit_bias, top_p=0.8))
    random = torch.Generator().manual_seed(vocab)
    masks = [torch.randint(0, 256, (length,), generator=random) for length in (0, vocab // 9, -(-vocab // 8), vocab)]
    texts = [torch.randint(0, vocab, (length,), generator=random).tolist() for length in (0, 7, 300)]
    draws = [
        replace(
            draw,
            mask=None if row % 3 else bytes(masks[row // 3 % 4].tolist()),
            prompt_token_ids=texts[row % 2],
            output_token_ids=texts[row % 3],
        )
        for row, draw in enumerate(draws_of(kinds))
        if vocab > max(BIASES.logit_bias.token_ids) or not draw.sampling.logit_bias
    ]
    logits = logits[: len(draws)]
    found = CpuSampling(instruction_set).sample(logits, draws).tolist()
    assert (FORBIDDEN in found) == (vocab != 0)
    assert Sampler(CpuSampling(instruction_set))(logits, draws) == Sampler()(logits, draws)


@pytest.mark.parametrize("instruction_set", SETS)
def test_tokens_outside_of_the_vocabulary_change_nothing(instruction_set: int) -> None:
    logits, kind = logits_of(50, 1.0, 2), replace(PENALTIES, logit_bias=((50, 9.0), (10**9, 5.0)))
    draws = [replace(draw, output_token_ids=[50, 3, -1]) for draw in draws_of((kind,), 2)]
    alone = [replace(draw, sampling=PENALTIES, output_token_ids=[3]) for draw in draws]
    kernel = CpuSampling(instruction_set)
    assert torch.equal(kernel.sample(logits, draws), kernel.sample(logits, alone))


def test_tokens_are_the_same_without_the_library() -> None:
    vocab = 3001
    logits = logits_of(vocab, 4.0)
    mask = bytes(0b10110110 for _ in range((vocab + 7) // 8))
    draws = [
        replace(draw, mask=mask if row % 5 == 0 else None)
        for row, draw in enumerate(draws_of((*KINDS, replace(USUAL, top_k=20, logit_bias=((17, 9.0),)))))
    ]
    draws[7] = replace(draws[7], mask=bytes(len(mask)))
    logits[8, 5], logits[9, 6] = torch.nan, torch.inf
    logits[10, 20:40] = 1e4
    assert choose_sampler(logits.device, logits.dtype).kernel is not None
    compiled = sample_tokens(logits, draws)
    assert compiled == Sampler()(logits, draws)
    assert [bool(token.error) for token in compiled[6:11]] == [False, True, True, True, False]


def test_rows_do_not_depend_on_others_or_on_threads() -> None:
    logits, draws, kernel = logits_of(5000, 2.0), draws_of(KINDS), CpuSampling()
    together = kernel.sample(logits, draws)
    scored = kernel.logprobs(logits, together.clamp(min=0).tolist(), 5)
    try:
        for threads in (1, 3):
            set_threads(threads)
            assert torch.equal(kernel.sample(logits, draws), together)
            for row in (0, 17):
                one = slice(row, row + 1)
                assert torch.equal(kernel.sample(logits[one], draws[one]), together[one])
                alone = kernel.logprobs(logits[one], together[one].tolist(), 5)
                assert all(torch.equal(mine, all_[one]) for mine, all_ in zip(alone, scored, strict=True))
    finally:
        set_threads(0)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_log_probabilities_are_those_of_float64(vocab: int, spread: float, instruction_set: int) -> None:
    logits = logits_of(vocab, spread)
    token_ids = torch.randint(0, vocab, (ROWS,), generator=torch.Generator().manual_seed(vocab))
    chosen, ids, values = CpuSampling(instruction_set).logprobs(logits, token_ids.tolist(), 20)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), exact.gather(1, token_ids[:, None])[:, 0], rtol=2e-7, atol=5e-7)
    assert ids.shape == (ROWS, min(20, vocab))
    assert torch.equal(ids, exact.sort(dim=-1, descending=True, stable=True).indices[:, :20])
    torch.testing.assert_close(values.double(), exact.gather(1, ids), rtol=2e-7, atol=5e-7)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("num_top", [0, 1, 3, 20])
def test_of_equal_tokens_the_lowest_come_first(num_top: int, instruction_set: int) -> None:
    logits = logits_of(500, 1.0).mul(2).round()
    logits[3:5] = 0.0
    _, ids, values = CpuSampling(instruction_set).logprobs(logits, [0] * ROWS, num_top)
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, ordered.indices[:, :num_top])
    assert torch.equal(values, values.sort(-1, descending=True).values)


def test_log_probabilities_of_rows_that_are_not_finite() -> None:
    logits = logits_of(300, 1.0, 4)
    logits[0, 7], logits[1, 8], logits[2, 9] = torch.nan, torch.inf, -torch.inf
    chosen, ids, values = CpuSampling().logprobs(logits, [1, 1, 9, 1], 2)
    assert chosen[:2].isnan().all()
    assert values[:2].isnan().all()
    assert chosen[2] == -torch.inf
    torch.testing.assert_close(values[2:], logits[2:].log_softmax(-1).gather(1, ids[2:]))


def test_other_numbers_are_left_to_torch_and_columns_may_lie_apart() -> None:
    logits, draws = logits_of(10, 1.0), draws_of((USUAL,))
    assert CpuSampling().unsupported_reason(logits.device, torch.float64)
    assert torch.equal(CpuSampling().sample(logits[:, ::2], draws), CpuSampling().sample(logits[:, ::2].clone(), draws))
    with pytest.raises(ValueError, match="set 7"):
        CpuSampling(7).sample(logits, draws)
