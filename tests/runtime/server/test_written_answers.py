"""Long answers are written in pieces that, joined, are the JSON of the whole."""

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.server.answers import BLOCK_CHARACTERS, SLICE_SECONDS, blocks
from runtime.server.response_models import ITEMS_AT_ONCE, json_pieces


class Items(list):
    """A list to be written from an iterator."""


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
FLAT = st.lists(SCALARS, max_size=4) | st.dictionaries(st.text(), SCALARS, max_size=4)
VALUES = st.recursive(
    SCALARS | FLAT,
    lambda inner: st.lists(inner, max_size=4).map(Items) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def lazily(value: Any) -> Any:
    """The value with iterators for its long lists."""
    if isinstance(value, Items):
        return (lazily(item) for item in value)
    return {name: lazily(item) for name, item in value.items()} if isinstance(value, dict) else value


@given(value=VALUES)
@examples(80)
def test_pieces_are_the_whole(value: Any) -> None:
    written = "".join(json_pieces(lazily(value)))
    assert written == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("number", [0, 1, ITEMS_AT_ONCE, ITEMS_AT_ONCE + 1, 5 * ITEMS_AT_ONCE])
@pytest.mark.parametrize("item", [1.5, "a", None, {"a": 1}])
def test_no_piece_holds_many_items(number: int, item: Any) -> None:
    pieces = list(json_pieces({"list": chain([item] * number), "b": 1}))
    assert json.loads("".join(pieces)) == {"list": [item] * number, "b": 1}
    longest = ITEMS_AT_ONCE * (len(json.dumps(item)) + 1)
    assert max(map(len, pieces)) <= longest + len('"list":')


def test_others_run_while_a_long_answer_is_written() -> None:
    """While writing takes its time, others get a turn between any two slices."""
    turns = 0

    def slow() -> Iterator[str]:
        for _ in range(20):
            time.sleep(0.004)  # more than a slice
            yield "x" * (BLOCK_CHARACTERS // 8)

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def write() -> list[bytes]:
        task = asyncio.create_task(others())
        written = [block async for block in blocks(slow(), asyncio.Lock())]
        task.cancel()
        return written

    written = asyncio.run(write())
    assert b"".join(written) == b"x" * (20 * BLOCK_CHARACTERS // 8)
    assert all(len(block) >= BLOCK_CHARACTERS for block in written[:-1])
    assert turns >= 20


def test_of_many_long_answers_one_is_written_at_a_time() -> None:
    """Otherwise slices of others fill the pauses of each, and the engine waits for the interpreter lock."""
    slices: list[tuple[float, float]] = []

    def slow() -> Iterator[str]:
        for _ in range(4):
            began = time.monotonic()
            time.sleep(0.004)  # more than a slice
            slices.append((began, time.monotonic()))
            yield "x"

    async def write(turns: asyncio.Lock) -> None:
        async for _ in blocks(slow(), turns):
            pass

    async def write_many() -> None:
        turns = asyncio.Lock()
        await asyncio.gather(*(write(turns) for _ in range(5)))

    asyncio.run(write_many())
    later = slices[5:]  # the first slice of each answer may be all of it, and does not wait
    pauses = [after - end for (_, end), (after, _) in pairwise(later)]
    assert min(pauses) >= SLICE_SECONDS * 0.9
