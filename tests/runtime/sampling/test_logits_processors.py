"""Penalties, logit bias and grammar masks: the right distribution, and the same tokens whatever the batch."""

import pytest
import torch
from exact_sampling import chi_square, exact_distribution, exact_scores, pack_mask
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from transformers import RepetitionPenaltyLogitsProcessor

from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.sampling.logits_processors import adjust_logits, candidates
from runtime.sampling.sampler import sample_tokens

VOCAB = 19
PROMPT = (1, 2, 2, 3, 9)
OUTPUT = (4, 4, 4, 9, 2, 17)
MASK = pack_mask([0, 2, 4, 5, 7, 9, 12, 16, 18], VOCAB)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": -0.8}
TRUNCATION = {"temperature": 1.4, "top_k": 12, "top_p": 0.95, "min_p": 0.01}
BIAS = {"logit_bias": ((5, 2.5), (4, -3.0), (11, 1.0))}


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw(position: int = 0, mask: bytes | None = None, seed: int = 3, **options) -> SamplingMetadata:
    return SamplingMetadata(SamplingParams(**options), seed, position, PROMPT, OUTPUT, mask)


CASES = {
    "repetition": ({"repetition_penalty": 1.8}, None),
    "repetition below 1": ({"repetition_penalty": 0.6}, None),
    "presence": ({"presence_penalty": 1.5}, None),
    "frequency": ({"frequency_penalty": 0.8}, None),
    "bias": (BIAS, None),
    "mask": ({}, MASK),
    "mask and truncation": (TRUNCATION, MASK),
    "penalties, bias and truncation": (PENALTIES | BIAS | TRUNCATION, None),
    "everything": (PENALTIES | BIAS | TRUNCATION, MASK),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_follow_the_distribution(name):
    options, mask = CASES[name]
    row, number = logits(), 4_000
    tokens = []
    for start in range(0, 5 * number, number):
        draws = [draw(start + n, mask, **options) for n in range(number)]
        tokens += [found.token_id for found in sample_tokens(row.expand(number, -1), draws)]
    assert abs(chi_square(tokens, exact_distribution(row[0], draws[0]))) < 5


@pytest.mark.full
@pytest.mark.parametrize("left_out", ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"])
def test_the_statistic_sees_when_one_is_missing(left_out):
    options = PENALTIES | BIAS
    draws = [draw(n, **options) for n in range(20_000)]
    tokens = [found.token_id for found in sample_tokens(logits().expand(20_000, -1), draws)]
    wrong = {name: value for name, value in options.items() if name != left_out}
    assert chi_square(tokens, exact_distribution(logits()[0], draw(**wrong))) > 20


def test_repetition_penalty_equals_transformers():
    row = logits().double()
    history = torch.tensor([[*PROMPT, *OUTPUT]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, row.clone())
    assert torch.equal(adjust_logits(row, [draw(repetition_penalty=1.3)]), expected)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_a_repetition_penalty_too_small_for_the_dtype_keeps_to_the_order_and_the_mask(temperature):
    row = logits()
    row[0, 9], row[0, 4], row[0, 2] = 1.0, 3.0, 2.0
    allowed = draw(mask=pack_mask([0, 2, 4, 9], VOCAB), temperature=temperature, repetition_penalty=1e-300)
    assert not adjust_logits(row, [allowed]).isnan().any()
    assert [token.token_id for token in sample_tokens(row, [allowed])] == [4]


def test_rows_that_ask_for_nothing_stay_as_they_are():
    rows = logits(3)
    assert not any(each.changes_logits for each in (draw(), draw(temperature=0), draw(top_k=3)))
    before = rows.clone()
    adjusted = adjust_logits(rows, [draw(), draw(mask=MASK, **PENALTIES, **BIAS), draw()])
    assert torch.equal(rows, before)
    assert torch.equal(adjusted[[0, 2]], rows[[0, 2]])


params = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=3).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
)
token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=8)
masks = st.none() | st.lists(st.integers(0, VOCAB - 1)).map(lambda ids: pack_mask(ids, VOCAB))
any_draw = st.builds(
    lambda options, *rest: SamplingMetadata(SamplingParams(**options), *rest),
    params,
    st.integers(0, 2**63 - 1),
    st.integers(0, 100),
    token_ids,
    token_ids,
    masks,
)


@given(draws=st.lists(any_draw, min_size=1, max_size=6), seed=st.integers(0, 1000), data=st.data())
@examples(150)
def test_same_token_whatever_the_batch(draws, seed, data):
    rows = logits(len(draws), seed)
    together = sample_tokens(rows, draws)
    assert together == [sample_tokens(rows[n : n + 1], [draws[n]])[0] for n in range(len(draws))]
    order = data.draw(st.permutations(range(len(draws))))
    assert sample_tokens(rows[order], [draws[n] for n in order]) == [together[n] for n in order]


@given(drawn=any_draw, seed=st.integers(0, 1000))
@examples(150)
def test_scores_equal_the_definition_and_only_possible_tokens_come(drawn, seed):
    row = logits(1, seed).double()
    expected = exact_scores(row[0], drawn)
    torch.testing.assert_close(adjust_logits(row, [drawn])[0], expected, rtol=1e-12, atol=1e-12)
    (token,) = sample_tokens(row, [drawn])
    if expected.max() == float("-inf"):
        assert "allows no token" in token.error
    elif drawn.sampling.temperature == 0:
        assert expected[token.token_id] == pytest.approx(expected.max().item(), abs=1e-12)
    else:
        assert exact_distribution(row[0], drawn)[token.token_id] > 0


def test_a_row_whose_mask_allows_nothing_fails_alone():
    rows = logits(3)
    draws = [draw(mask=MASK), draw(mask=bytes(3)), draw()]
    found = sample_tokens(rows, draws)
    assert (found[1].token_id, found[1].error) == (-1, "the request allows no token here")
    assert [found[0], found[2]] == [sample_tokens(rows[n : n + 1], [draws[n]])[0] for n in (0, 2)]


@pytest.mark.parametrize("num_bytes", [1, 2, 50])
def test_masks_shorter_and_longer_than_the_table(num_bytes):
    """The model's table may be padded beyond the tokenizer's: ids that the mask does not know are forbidden."""
    scores = adjust_logits(logits(), [draw(mask=b"\xff" * num_bytes)])
    assert scores.isfinite().sum() == min(8 * num_bytes, VOCAB)


def test_a_wide_vocabulary_with_few_allowed_tokens_is_not_sorted():
    row = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    mask = pack_mask([7, 4000], 5000)
    scores = adjust_logits(row, [draw(mask=mask)])
    _, ids = candidates(scores, torch.tensor([50]), torch.tensor([0.9999]), torch.tensor([0.0]))
    assert ids.shape == (1, 128)
    draws = [draw(position, mask, top_k=50, top_p=0.9999) for position in range(50)]
    assert {found.token_id for found in sample_tokens(row.expand(50, -1), draws)} == {7, 4000}


def test_logprobs_are_of_the_unmodified_distribution():
    row = logits()
    (token,) = sample_tokens(row, [draw(temperature=0, logprobs=2, mask=MASK, **PENALTIES, **BIAS)])
    expected = row[0].log_softmax(0)
    assert token.logprobs.logprob == pytest.approx(expected[token.token_id].item(), abs=1e-6)
    assert [value for _, value in token.logprobs.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-6)
