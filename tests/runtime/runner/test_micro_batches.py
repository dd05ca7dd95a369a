"""Parts of a step cover every token once, in order, and divide a span only where a block ends."""

from itertools import pairwise

import pytest

from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence
from runtime.runner.micro_batches import split_step

BLOCK = 16


def entry(name: str, start: int, num_tokens: int, **options: object) -> ScheduledSequence:
    sequence = Sequence(Request(name, (), SamplingParams(), 0), [0] * (start + num_tokens))
    return ScheduledSequence(sequence, start, num_tokens, **options)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "spans",
    [[(0, 256)], [(5, 250)], [(100, 1)] * 64, [(40, 1)] * 20 + [(0, 90), (33, 140)], [(0, 300), (7, 301)]],
    ids=str,
)
def test_parts_cover_a_step(spans: list[tuple[int, int]], count: int) -> None:
    entries = [entry(str(index), *span) for index, span in enumerate(spans)]
    parts = split_step(entries, count, 32, BLOCK)
    pieces = [piece for part in parts for piece in part]
    total = sum(num_tokens for _, num_tokens in spans)
    assert [piece.row for piece in pieces] == [0, *[each.row + each.entry.num_tokens for each in pieces[:-1]]]
    assert sum(piece.entry.num_tokens for piece in pieces) == total
    assert len(parts) > 1
    for whole in entries:
        own = [piece.entry for piece in pieces if piece.entry.sequence is whole.sequence]
        assert own[0].start == whole.start
        assert all(first.start + first.num_tokens == second.start for first, second in pairwise(own))
        assert all(second.start % BLOCK == 0 for second in own[1:])
        assert [each.samples for each in own] == [False] * (len(own) - 1) + [True]
    largest = max(sum(piece.entry.num_tokens for piece in part) for part in parts)
    assert largest <= total / min(count, total // 32) + BLOCK


def test_small_steps_and_spans_with_states_stay_whole() -> None:
    assert len(split_step([entry("a", 3, 40)], 2, 32, BLOCK)) == 1
    (part,) = split_step([entry("a", 0, 256, state_writes=((255, 1),))], 2, 32, BLOCK)
    assert [piece.entry.num_tokens for piece in part] == [256]
