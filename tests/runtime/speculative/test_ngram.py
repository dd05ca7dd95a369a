from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.request import Request, SamplingParams, Sequence
from runtime.speculative.ngram import LENGTHS, MAX_TREE_TOKENS, TREE_BRANCHES, NgramDrafter


def new_sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("a", tuple(tokens), SamplingParams(), seed=0), list(tokens))


def guess(drafter: NgramDrafter, sequence: Sequence, count: int = 4) -> list[int]:
    drafter.propose([(sequence, count)])
    return sequence.draft_token_ids


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([1, 2, 9, 8, 7, 2, 9], [8, 7, 2, 9]),  # two tokens are enough
        ([1, 2, 3, 4, 9, 2, 3, 5, 0, 1, 2, 3], [4, 9, 2, 3]),  # three count more than the later two
        ([5, 6, 7, 5, 6, 8, 5, 6], [8, 5, 6, 8]),  # the latest place; what runs into the end goes round
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3, 4, 5], []),
        ([1], []),
        ([1, 2], []),
    ],
)
def test_what_followed_before_is_guessed(tokens: list[int], guesses: list[int]) -> None:
    assert guess(NgramDrafter(), new_sequence(tokens)) == guesses


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 39))
def test_growing_by_pieces_finds_what_a_new_index_finds(tokens: list[int], cut: int) -> None:
    drafter, sequence = NgramDrafter(), new_sequence(tokens[:cut])
    guess(drafter, sequence)
    sequence.token_ids += tokens[cut:]
    found = guess(drafter, sequence)
    assert found == guess(NgramDrafter(), new_sequence(tokens))
    if found:
        seen = tokens[:cut] + tokens[cut:]
        assert any(
            tuple(seen[-length:] + found[:1]) == tuple(seen[end : end + length + 1])
            for length in LENGTHS
            for end in range(len(seen) - length)
        )


def test_no_wish_no_guess_and_ended_sequences_are_forgotten() -> None:
    drafter, sequence = NgramDrafter(), new_sequence([4, 4, 4])
    guess(drafter, sequence)
    assert guess(drafter, sequence, count=0) == []
    drafter.propose([])
    assert not drafter._indices


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    drafter, sequence = NgramDrafter(), new_sequence([i * i % 9973 for i in range(60_000)])
    guess(drafter, sequence)
    start = perf_counter()
    for token in range(1000):
        sequence.token_ids.append(token)
        guess(drafter, sequence)
    assert perf_counter() - start < 0.5


@pytest.mark.parametrize(
    ("tokens", "guesses", "parents"),
    [
        ([5, 6, 7, 5, 6, 8, 5, 6], [8, 5, 6, 7, 5, 6], [-1, 0, 1, -1, 3, 4]),  # the latest place first
        ([1, 2, 3, 4, 9, 2, 3, 5, 0, 1, 2, 3], [4, 9, 2, 5, 0, 1], [-1, 0, 1, -1, 3, 4]),  # three count more
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6], []),  # one place is a chain
        ([4, 4, 4], [4, 4, 4], []),
        ([1, 2, 3], [], []),
    ],
)
def test_a_tree_has_a_branch_for_every_earlier_place(tokens: list[int], guesses: list[int], parents: list[int]) -> None:
    drafter, sequence = NgramDrafter(TREE_BRANCHES), new_sequence(tokens)
    assert guess(drafter, sequence, 3) == guesses
    assert sequence.draft_parents == parents


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 59), st.integers(1, 16))
def test_trees_begin_with_the_chain_and_stay_small(tokens: list[int], cut: int, count: int) -> None:
    drafter, sequence = NgramDrafter(TREE_BRANCHES), new_sequence(tokens[:cut])
    guess(drafter, sequence, count)
    sequence.token_ids += tokens[cut:]
    found = guess(drafter, sequence, count)
    chain = guess(NgramDrafter(), new_sequence(tokens), count)
    assert found[: len(chain)] == chain
    assert len(found) <= MAX_TREE_TOKENS
    assert bool(found) == bool(chain)


def test_what_must_follow_a_grammar_gets_a_chain() -> None:
    drafter, sequence = NgramDrafter(TREE_BRANCHES), new_sequence([5, 6, 7, 5, 6, 8, 5, 6])
    sequence.constraint = object()
    assert guess(drafter, sequence, 3) == [8, 5, 6]
    assert not sequence.draft_parents
