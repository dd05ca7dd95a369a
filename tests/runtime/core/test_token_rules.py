from typing import Any

import pytest

from compress.common.errors import RequestError
from runtime.core.request import SamplingParams
from runtime.core.token_rules import RuledConstraint, bits_of, with_rules

VOCABULARY, END = 20, 0


class Even:
    """Allows even tokens."""

    is_slow = is_complete = is_stuck = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> bytes:
        return bytes([0b01010101, 0b01010101, 0b0101])

    def accept(self, token_ids: list[int]) -> int:
        odd = next((count for count, token in enumerate(token_ids) if token % 2), len(token_ids))
        self.taken += token_ids[:odd]
        return odd

    def prepare(self, token_id: int) -> None:
        self.taken.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]


def constraint(grammar: Even | None = None, **rules: Any) -> RuledConstraint:
    return RuledConstraint(SamplingParams(**rules), VOCABULARY, {END}, grammar)


def allowed(found: RuledConstraint) -> list[int]:
    mask = found.mask()
    assert len(mask) == 3
    return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]


def test_a_request_without_rules_keeps_its_grammar() -> None:
    grammar = Even()
    assert with_rules(SamplingParams(), VOCABULARY, {END}, grammar) is grammar
    assert with_rules(SamplingParams(), VOCABULARY, {END}, None) is None


def test_only_listed_tokens() -> None:
    found = constraint(allowed_token_ids=(3, 9, 19))
    assert allowed(found) == [3, 9, 19]
    assert found.accept([3, 9, 4, 3]) == 2


def test_no_end_before_the_least_length_also_behind_drafts() -> None:
    found = constraint(min_tokens=2)
    assert allowed(found) == list(range(1, VOCABULARY))
    assert found.accept([5, 6]) == 2
    assert allowed(found) == list(range(VOCABULARY))
    found.rollback(1)
    assert END not in allowed(found)


def test_an_end_that_alone_is_allowed_may_come_early() -> None:
    assert allowed(constraint(min_tokens=2, allowed_token_ids=(END,))) == [END]


def test_words_of_one_and_of_several_tokens_do_not_occur() -> None:
    found = constraint(bad_words=((7,), (1, 2, 3), (2, 4)))
    assert sorted({*range(VOCABULARY)} - {*allowed(found)}) == [7]
    assert found.accept([1, 2]) == 2
    assert sorted({*range(VOCABULARY)} - {*allowed(found)}) == [3, 4, 7]
    assert found.accept([4]) == 0
    found.rollback(1)
    assert sorted({*range(VOCABULARY)} - {*allowed(found)}) == [7]
    assert found.accept([4, 1, 2, 9, 3]) == 5


def test_a_grammar_is_followed_too() -> None:
    grammar = Even()
    found = constraint(grammar, bad_words=((4,),), min_tokens=1)
    assert allowed(found) == [2, 6, 8, 10, 12, 14, 16, 18]
    assert found.accept([2, 6, 3]) == 2
    assert grammar.taken == [2, 6]
    assert found.accept([4]) == 0
    found.rollback(2)
    assert grammar.taken == []


def test_bits() -> None:
    assert bits_of([]) == 0
    assert bits_of([0, 9, 9, 70]) == 1 + 2**9 + 2**70


@pytest.mark.parametrize("wrong", [{"min_tokens": 17}, {"min_tokens": -1}, {"bad_words": ((1,), ())}])
def test_rules_that_cannot_be_kept_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)
