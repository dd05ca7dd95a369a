"""Choice of an engine by cached prefixes and load."""

import random
from collections import Counter
from itertools import product

import pytest

from runtime.routing.prefixes import MOST_AHEAD, SentPrefixes, rank

KEYS = [b"1", b"2", b"3", b"4"]


def test_the_longest_prefix_wins_unless_its_engine_is_too_busy() -> None:
    whole = {"a": 1.0, "b": 0.0}
    assert rank(whole, {"a": MOST_AHEAD, "b": 0}) == ["a", "b"]
    assert rank(whole, {"a": MOST_AHEAD + 1, "b": 0}) == ["b", "a"]
    half = {"a": 0.5, "b": 0.0}
    assert rank(half, {"a": MOST_AHEAD // 2, "b": 0}) == ["a", "b"]
    assert rank(half, {"a": MOST_AHEAD // 2 + 1, "b": 0}) == ["b", "a"]
    assert rank({"a": 0.25, "b": 0.75, "c": 0.5}, dict.fromkeys("abc", 3)) == ["b", "c", "a"]


def test_without_a_prefix_the_least_loaded_engine_is_first() -> None:
    assert rank(dict.fromkeys("abc", 0.0), {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]
    assert rank(dict.fromkeys("abc", 0.7), {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]
    assert rank(dict.fromkeys("cab", 0.0), dict.fromkeys("cab", 1)) == ["c", "a", "b"]


@pytest.mark.every_combination
def test_no_engine_is_ahead_by_more_than_the_bound() -> None:
    shares = (0.0, 0.3, 1.0)
    for mine, other, load in product(shares, shares, range(2 * MOST_AHEAD)):
        first, _ = rank({"a": mine, "b": other}, {"a": load, "b": 0})
        if first == "a":
            assert load <= MOST_AHEAD * max(0.0, mine - other)
        else:
            assert load > MOST_AHEAD * (mine - other) or (load == 0 and other >= mine)


def test_a_longer_prompt_follows_its_beginning() -> None:
    sent, idle = SentPrefixes(100), dict.fromkeys("abc", 0)
    sent.note(KEYS[:2], "b")
    assert sent.choose(KEYS, idle)[0] == "b"
    sent.note([*KEYS[:1], b"other"], "c")
    assert [sent.count(KEYS, name) for name in "abc"] == [0, 2, 1]
    assert sent.choose(KEYS, idle) == ["b", "c", "a"]


def test_engines_that_are_gone_are_forgotten() -> None:
    sent = SentPrefixes(100)
    sent.note(KEYS, "a")
    assert sent.choose(KEYS, {"b": 3, "c": 2}) == ["c", "b"]
    assert sent.choose(KEYS, {"a": 0, "b": 0})[0] == "b" or not sent.count(KEYS, "a")
    assert "a" not in sent.keys


@pytest.mark.parametrize("most", [0, 5, 1000])
def test_prompts_without_a_common_start_take_turns(most: int) -> None:
    sent, got = SentPrefixes(most), Counter[str]()
    for number in range(100):
        keys = [number.to_bytes(4, "big")]
        chosen = sent.choose(keys, dict.fromkeys("abcd", 0))[0]
        sent.note(keys, chosen)
        got[chosen] += 1
    assert set(got.values()) == {25}


def test_a_common_start_spreads_over_all_engines_under_load() -> None:
    sent, loads = SentPrefixes(1000), dict.fromkeys("ab", 0)
    for number in range(100):
        keys = [b"system", b"prompt", number.to_bytes(4, "big")]
        chosen = sent.choose(keys, loads)[0]
        sent.note(keys, chosen)
        loads[chosen] += 1
        assert max(loads.values()) - min(loads.values()) <= MOST_AHEAD
    assert set(loads.values()) == {50}


def test_prefixes_are_forgotten_from_their_end_and_the_oldest_first() -> None:
    sent, draw = SentPrefixes(50), random.Random(0)
    chains = [[bytes([chain, place]) for place in range(draw.randrange(1, 70))] for chain in range(30)]
    for _ in range(300):
        chain = draw.choice(chains)
        name, length = draw.choice("ab"), draw.randrange(1, len(chain) + 1)
        sent.note(chain[:length], name)
        assert sent.count(chain, name) >= min(length, 50)
        for known in sent.keys.values():
            assert len(known) <= 50
            assert all(bytes([key[0], place]) in known for key in known for place in range(key[1]))
