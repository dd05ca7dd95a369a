from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.output_processor import StopMatcher


def feed(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


@pytest.mark.parametrize("first", range(1, 12))
@pytest.mark.parametrize("second", range(1, 12))
def test_a_stop_string_is_found_wherever_the_text_is_cut(first: int, second: int) -> None:
    text = "hello<stop>there"
    cuts = sorted({first, first + second})
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert feed(["<stop>"], pieces) == ("hello", True)


def test_nothing_of_a_stop_string_leaks_and_nothing_else_is_held() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abc") == "abc"
    assert matcher.push("dE") == "d"
    assert matcher.push("N") == ""
    assert matcher.push("x") == "ENx"
    assert matcher.push("EN") == ""
    assert matcher.push("D and more") == ""
    assert matcher.matched
    assert matcher.push("later") == ""
    assert matcher.flush() == ""


def test_text_held_at_the_end_comes_out() -> None:
    assert feed(["\n\n"], ["a", "\n"]) == ("a\n", False)


def test_the_stop_that_is_complete_first_wins_however_the_text_arrives() -> None:
    assert feed(["abcd", "bc"], ["abcd"]) == ("a", True)
    assert feed(["abcd", "bc"], list("abcd")) == ("a", True)


def first_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition: read character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20)),
)
def test_it_equals_the_definition_for_every_cut(text: str, stop: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert feed(stop, pieces) == first_stop(text, stop)
