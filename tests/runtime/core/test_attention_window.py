"""Which blocks are out of reach, against counting tokens one by one."""

import pytest
from fake_runner import visible_positions
from hypothesis import given
from hypothesis import strategies as st

from compress.common.errors import ToolkitError
from runtime.core.attention_window import (
    FULL_ATTENTION,
    RELEASED,
    AttentionWindow,
    held_blocks,
    resolve_attention_window,
)

reaches = st.builds(AttentionWindow, st.integers(1, 20), st.integers(0, 9))
block_sizes = st.integers(1, 6)


def seen_blocks(attention_window: AttentionWindow, positions: range, block_size: int) -> set[int]:
    return {seen // block_size for position in positions for seen in visible_positions(position + 1, attention_window)}


@given(reaches, block_sizes, st.integers(0, 60))
def test_hidden_blocks_are_those_that_no_later_token_sees(
    attention_window: AttentionWindow, block_size: int, position: int
) -> None:
    seen = seen_blocks(attention_window, range(position, position + 80), block_size)
    before = range(position // block_size + 1)
    assert set(attention_window.evictable_blocks(position, block_size)) == set(before) - seen


@given(reaches, block_sizes, st.integers(1, 9), st.integers(1, 70), st.integers(0, 60))
def test_a_sequence_never_holds_more_blocks_than_said(
    attention_window: AttentionWindow, block_size: int, step: int, num_tokens: int, computed: int
) -> None:
    """A table covers the next step, and its blocks stay below `blocks_for` wherever the sequence stands."""
    computed = min(computed, num_tokens - 1)
    covered = attention_window.table_tokens(num_tokens, computed, step)
    assert covered >= min(num_tokens, computed + step)
    held = -(-covered // block_size) - len(attention_window.evictable_blocks(computed, block_size))
    assert held <= attention_window.blocks_for(num_tokens, step, block_size) <= -(-num_tokens // block_size)


def test_blocks_of_a_long_prompt_are_those_of_the_window_and_a_step() -> None:
    assert AttentionWindow(4096).blocks_for(10**6, 256, 16) == (4096 + 256) // 16 + 1
    assert AttentionWindow(1024, 4).blocks_for(10**6, 256, 16) == 1 + (1024 + 256) // 16 + 1
    assert FULL_ATTENTION.blocks_for(10**6, 256, 16) == 10**6 // 16


@given(reaches | st.just(FULL_ATTENTION), block_sizes, st.lists(st.booleans(), max_size=14), st.integers(1, 6))
def test_the_usable_prefix_is_the_longest_with_all_that_is_seen(
    attention_window: AttentionWindow, block_size: int, known: list[bool], more: int
) -> None:
    num_tokens = len(known) * block_size + min(more, block_size) - 1
    if not num_tokens:
        return

    def usable(end: int) -> bool:
        position = min(end * block_size, num_tokens - 1)
        needed = seen_blocks(attention_window, range(position, position + 1), block_size) & set(range(end))
        return all(known[index] for index in needed)

    expected = max(end for end in range(len(known) + 1) if usable(end))
    assert attention_window.usable_prefix(known, num_tokens, block_size) == expected


def test_the_reach_of_models() -> None:
    assert resolve_attention_window([None, None], 100, None, 0) == FULL_ATTENTION
    assert resolve_attention_window([None, 16], 100, None, 0) == FULL_ATTENTION
    assert resolve_attention_window([16, 16], 100, None, 0) == AttentionWindow(16)
    assert resolve_attention_window([None, None], 100, 96, 4) == AttentionWindow(96, 4)
    assert resolve_attention_window([None, 16], 100, 12, 0) == AttentionWindow(12)


@pytest.mark.parametrize(
    ("windows", "window", "sinks", "message"),
    [
        ([None], None, 4, r"4 attention.*--attention-window.*1024"),
        ([None], 97, 4, r"4 attention.*97 tokens.*100 tokens.*--attention-window.*96"),
        ([None], 0, 4, "0 tokens"),
        ([None], 1, 100, "100 tokens.*--attention-sinks"),
        ([16, None], 17, 0, r"16.*--attention-window.*16"),
    ],
)
def test_wishes_that_do_not_fit(windows: list[int | None], window: int | None, sinks: int, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        resolve_attention_window(windows, 100, window, sinks)


def test_held_blocks() -> None:
    assert held_blocks([3, RELEASED, RELEASED, 0]) == [3, 0]
