"""Top-n-sigma, typical-p and XTC leave the tokens that their definitions say, in their order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.core.token_filters import coin
from runtime.sampling.filters import filter_rows
from runtime.sampling.sampler import probabilities, sample_tokens

VOCAB = 37


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw(seed: int = 0, position: int = 0, **options) -> SamplingMetadata:
    return SamplingMetadata(SamplingParams(**options), seed, position)


def left(row: torch.Tensor, **options) -> set[int]:
    return set(probabilities(row.unsqueeze(0), [draw(**options)])[0].nonzero().flatten().tolist())


def typical_by_the_book(scores: np.ndarray, share: float) -> set[int]:
    p = np.exp(scores - scores.max())
    p /= p.sum()
    entropy = -sum(value * math.log(value) for value in p)
    mass, found = 0.0, set()
    for token in sorted(range(len(p)), key=lambda token: abs(-math.log(p[token]) - entropy)):
        if found and mass >= share:
            break
        found.add(token)
        mass += p[token]
    return found


@pytest.mark.parametrize("share", [0.05, 0.3, 0.777, 0.95])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_typical_tokens(share, temperature):
    row = logits(seed=4)[0]
    expected = typical_by_the_book(row.double().numpy() / temperature, share)
    assert left(row, typical_p=share, temperature=temperature) == expected


@pytest.mark.parametrize("number", [0.1, 1.0, 2.5])
def test_sigmas_are_of_the_logits_whatever_the_temperature(number):
    row = logits(seed=1)[0]
    values = row.double().numpy()
    expected = set(np.flatnonzero(values >= values.max() - number * values.std()).tolist())
    assert left(row, top_n_sigma=number, temperature=0.5) == left(row, top_n_sigma=number, temperature=3.0) == expected


def test_xtc_leaves_the_least_likely_of_the_top_choices():
    row = torch.tensor([0.4, 0.1, 0.25, 0.2, 0.05]).log()
    assert left(row, xtc_probability=1.0, xtc_threshold=0.15) == {1, 3, 4}
    assert left(row, xtc_probability=1.0, xtc_threshold=0.3) == {0, 1, 2, 3, 4}
    assert left(row, xtc_probability=1.0, xtc_threshold=0.15, top_k=3) == {3}
    assert left(row, xtc_probability=1.0, xtc_threshold=0.6) == {0, 1, 2, 3, 4}


def test_xtc_acts_as_often_as_it_is_asked_to():
    row = torch.tensor([[0.4, 0.1, 0.25, 0.2, 0.05]]).log().expand(4000, -1)
    draws = [draw(seed=7, position=n, xtc_probability=0.3, xtc_threshold=0.15) for n in range(4000)]
    acted = probabilities(row, draws)[:, 0] == 0
    assert acted.tolist() == [coin(7, n) < 0.3 for n in range(4000)]
    assert abs(acted.double().mean() - 0.3) < 0.03


@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.floats(0.0, 3.0), st.integers(0, 5), st.floats(0.0, 0.6))
def test_some_token_is_always_left(seed, typical_p, sigmas, top_k, threshold):
    options = {"typical_p": typical_p, "top_n_sigma": sigmas, "xtc_threshold": threshold, "xtc_probability": 1.0}
    row = logits(seed=seed)
    token = sample_tokens(row, [draw(top_k=top_k, **options)])[0]
    assert probabilities(row, [draw(top_k=top_k, **options)])[0, token.token_id] > 0


def test_masks_biases_and_penalties_come_first():
    row = torch.zeros(VOCAB)
    row[3], row[4] = 5.0, 4.9
    mask = np.packbits(np.arange(VOCAB) != 3, bitorder="little").tobytes()
    params = SamplingParams(top_n_sigma=0.01)
    assert set(
        probabilities(row[None], [SamplingMetadata(params, 0, 0, mask=mask)])[0].nonzero().flatten().tolist()
    ) == {4}
    assert left(row, top_n_sigma=0.01, logit_bias=((8, 50.0),)) == {8}


def test_the_rest_of_the_batch_does_not_matter():
    rows = logits(5)
    draws = [
        draw(seed=1, typical_p=0.5),
        draw(seed=2),
        draw(seed=3, temperature=0, top_n_sigma=1.0),
        draw(seed=4, xtc_probability=0.9, xtc_threshold=0.05, top_p=0.9),
        draw(seed=5, top_n_sigma=1.0, logprobs=2),
    ]
    together = sample_tokens(rows, draws)
    assert together == [sample_tokens(rows[n : n + 1], [draws[n]])[0] for n in range(5)]
    assert together[2].token_id == int(rows[2].argmax())


def test_rows_without_filters_and_broken_rows_stay_as_they_are():
    rows = logits(2)
    plain = [draw(), draw(temperature=0, typical_p=0.1)]
    assert filter_rows(rows, plain) is plain
    rows[1, 5] = float("nan")
    found = sample_tokens(rows, [draw(), draw(top_n_sigma=1.0)])
    assert not found[0].error
    assert "not finite" in found[1].error
