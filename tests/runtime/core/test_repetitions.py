"""DRY finds the longest repetition that a token would continue."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.common.errors import RequestError
from runtime.core.repetitions import MAX_PENALTY, dry_penalties, repeated_lengths
from runtime.core.request import SamplingParams

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_the_book(found: list[int], breakers: set[int], longest: int) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for end in range(len(found) - 1):
        length = 0
        while length < min(longest, end + 1) and found[end - length] == found[-1 - length] not in breakers:
            length += 1
        if length:
            lengths[found[end + 1]] = max(length, lengths.get(found[end + 1], 0))
    return lengths


@given(tokens, st.sets(st.integers(0, 3), max_size=2), st.integers(1, 10))
def test_any_sequence(found, breakers, longest):
    assert repeated_lengths(np.array(found), breakers, longest) == by_the_book(found, breakers, longest)


def test_penalties_grow_with_the_repetition():
    params = SamplingParams(dry_multiplier=2.0, dry_base=3.0, dry_allowed_length=2)
    assert dry_penalties(params, (), array("i", [5, 1, 2]), [9, 1]) == {}
    assert dry_penalties(params, (), array("i", [5, 1, 2, 7]), [9, 1, 2]) == {7: 2.0}
    assert dry_penalties(params, (), array("i", [5, 1, 2, 7]), [5, 1, 2]) == {7: 6.0}
    assert dry_penalties(params, {1}, array("i", [5, 1, 2, 7]), [5, 1, 2]) == {}
    assert dry_penalties(params, {7}, array("i", [5, 1, 2, 7, 1, 2, 6]), [5, 1, 2]) == {6: 2.0}


def test_only_the_last_tokens_are_searched():
    prompt, output = array("i", [1, 2, 7, 0, 0]), [1, 2]
    whole = SamplingParams(dry_multiplier=1.0)
    assert dry_penalties(whole, (), prompt, output) == {7: 1.0}
    assert dry_penalties(SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=6), (), prompt, output) == {}
    assert not SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=0).has_dry


def test_long_repetitions_stay_finite():
    params = SamplingParams(dry_multiplier=100.0, dry_base=10.0)
    assert dry_penalties(params, (), array("i", [3] * 5000), []) == {3: MAX_PENALTY}


@pytest.mark.parametrize(
    "wrong",
    [
        {"dry_multiplier": -1.0},
        {"dry_base": 0.5},
        {"dry_allowed_length": 0},
        {"dry_penalty_last_n": -2},
        {"typical_p": 0.0},
        {"top_n_sigma": -0.5},
        {"xtc_probability": 1.5},
        {"xtc_threshold": float("nan")},
    ],
)
def test_wrong_numbers_are_refused_by_name(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)
