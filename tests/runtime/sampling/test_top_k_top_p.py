import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.sampling import logits_processors
from runtime.sampling.logits_processors import candidates


def kept(scores: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Ids of one row that may still be drawn."""
    numbers = (torch.tensor([value], dtype=scores.dtype) for value in (top_p, min_p))
    values, ids = candidates(scores[None], torch.tensor([top_k]), *numbers)
    allowed = values[0].isfinite()
    assert torch.equal(values[0][allowed], scores[ids[0][allowed]])
    return set(ids[0][allowed].tolist())


PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.84}, {1, 3, 4}),
        ({"top_p": 0.86}, {0, 1, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        # top-p measures what top-k left: 0.4 / 0.65 of the mass is the first token.
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"top_k": 2, "top_p": 0.7}, {1, 3}),
        ({"top_k": 4, "min_p": 0.6}, {1, 3}),
    ],
)
def test_one_row(options, expected):
    assert kept(PROBABILITIES.log(), **options) == expected


def test_equal_scores_stay_together():
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(scores, top_k=2) == {1, 2, 3, 4}
    assert kept(scores, top_p=0.5) == {1, 2, 3, 4}


def by_the_book(scores: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definitions, one token at a time."""
    weights = torch.tensor(scores, dtype=torch.float64).exp()
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    limit = scores[order[min(top_k, len(scores)) - 1]] if top_k else min(scores)
    left = [token for token in order if scores[token] >= limit]
    total = sum(weights[token].item() for token in left)
    result = set()
    for token in left:
        above = sum(weights[other].item() for other in left if scores[other] > scores[token])
        if (above == 0 or above / total < top_p) and weights[token] >= min_p * weights.max() * (1 - 1e-9):
            result.add(token)
    return result


@pytest.mark.parametrize("num_likely", [1, 3, 256])
@examples(150)
@given(
    scores=st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.033, 0.21, 0.513, 0.777, 0.919, 0.9901, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.123, 0.777, 1.0]),
)
def test_any_row(num_likely, scores, top_k, top_p, min_p):
    """Sorting a few likely tokens first changes nothing."""
    values = [score / 4 for score in scores]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_processors, "NUM_LIKELY", num_likely)
        found = kept(torch.tensor(values, dtype=torch.float64), top_k, top_p, min_p)
    assert found == by_the_book(values, top_k, top_p, min_p)


def test_top_k_beyond_the_likely_tokens_still_limits_the_mass_of_top_p(monkeypatch):
    monkeypatch.setattr(logits_processors, "NUM_LIKELY", 3)
    values = [0.0, 0.0, 0.0, 0.0, 0.0, 0.25, -0.25, 2.0]
    assert kept(torch.tensor(values, dtype=torch.float64), 4, 0.513, 0.0) == {7}


@pytest.mark.parametrize("num_likely", [4, 256])
def test_rows_are_independent(num_likely, monkeypatch):
    monkeypatch.setattr(logits_processors, "NUM_LIKELY", num_likely)
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    top_k, top_p = torch.tensor([0, 5, 0, 3]), torch.tensor([1.0, 1.0, 0.5, 0.9])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1])
    values, ids = candidates(scores, top_k, top_p, min_p)
    for row in range(4):
        alone = kept(scores[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
        assert alone == set(ids[row][values[row].isfinite()].tolist())
    assert values[0].isfinite().all()
