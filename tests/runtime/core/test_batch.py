import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.core.batch import AttentionGroup, build_batch, equal_rows, group_entries
from runtime.core.draft_tree import ancestor_bits
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence

BLOCK = 4
CPU = torch.device("cpu")


def entry(name: str, start: int, num_tokens: int, blocks: list[int], total: int | None = None) -> ScheduledSequence:
    tokens = [ord(name) * 1000 + position for position in range(total or start + num_tokens)]
    sequence = Sequence(Request(name, tuple(tokens), SamplingParams(), seed=0), tokens, block_ids=blocks)
    return ScheduledSequence(sequence, start, num_tokens)


def test_layout():
    batch = build_batch(
        [
            entry("A", 2, 5, [9, 4]),  # a span in the middle, crosses a block
            entry("B", 5, 1, [3, 7]),  # a single token
            entry("C", 0, 2, [5], total=6),  # the beginning of a prompt, does not sample
            entry("D", 12, 1, [0, 1, 2, 8]),  # a single token that begins a block
        ],
        BLOCK,
        CPU,
    )
    a, b, c, d = (1000 * ord(name) for name in "ABCD")
    assert batch.token_ids.tolist() == [b + 5, d + 12, c, c + 1, a + 2, a + 3, a + 4, a + 5, a + 6]
    assert batch.positions.tolist() == [5, 12, 0, 1, 2, 3, 4, 5, 6]
    assert batch.slots.tolist() == [29, 32, 20, 21, 38, 39, 16, 17, 18]
    assert [entry.sequence.id for entry in batch.sampling] == ["B", "D", "A"]
    assert batch.sample_rows.tolist() == [0, 1, 8]
    assert batch.fresh_blocks == (8, 5, 4)
    singles, prompt, span = batch.groups
    assert (singles.rows, prompt.rows, span.rows) == (slice(0, 2), slice(2, 4), slice(4, 9))
    assert singles.blocks.tolist() == [3, 7, 3, 3, 0, 1, 2, 8]
    assert (singles.num_sequences, singles.num_keys, singles.ragged) == (2, 13, True)
    assert (span.blocks.tolist(), span.num_keys, span.ragged) == ([9, 4], 7, True)
    assert (prompt.blocks.tolist(), prompt.num_keys, prompt.ragged) == ([5], 2, False)
    rows = batch.ragged
    assert (rows.starts.tolist(), rows.tables.tolist()) == ([0, 1, 2, 4, 9], [0, 4, 8, 9])
    assert rows.blocks.tolist() == [3, 7, 3, 3, 0, 1, 2, 8, 5, 9, 4]
    assert rows.positions.tolist() == batch.positions.tolist()
    assert (rows.lengths, rows.longest, rows.num_keys) == (((1, 6), (1, 13), (2, 2), (5, 7)), 5, 13)
    assert rows.ancestors is None
    assert (rows.first(3).starts.tolist(), rows.first(3).longest) == ([0, 1, 2, 4], 2)


def test_only_rows_of_trees_have_ancestors() -> None:
    drafted = entry("A", 4, 4, [9, 4])
    drafted.sequence.draft_parents, drafted.sequence.draft_token_ids = [-1, 0, -1], drafted.sequence.token_ids[5:]
    del drafted.sequence.token_ids[5:]
    batch = build_batch([entry("B", 0, 4, [3]), drafted, entry("C", 2, 30, list(range(8)))], BLOCK, CPU)
    expected = [0] * 4 + ancestor_bits((-1, 0, -1)) + [0] * 30
    assert batch.ragged.ancestors.tolist() == expected
    assert [None if g.ancestors is None else g.ancestors.tolist() for g in batch.groups] == [None, expected[4:8], None]


def test_rows_of_a_group_by_sequence() -> None:
    group = AttentionGroup(slice(0, 6), torch.arange(8), torch.arange(6), 2, 16, True)
    rows = equal_rows(group)
    assert (rows.starts.tolist(), rows.tables.tolist()) == ([0, 3, 6], [0, 4])
    assert (rows.longest, rows.num_keys, rows.lengths) == (3, 16, ())


def test_ancestors_in_an_earlier_chunk_are_left_out():
    """Two trees: a known token, a branch of two guesses and a single one, with chunks that end at other depths."""
    bits, positions = torch.tensor(ancestor_bits((-1, 0, -1))).repeat(2), torch.tensor([5, 6, 7, 6, 14, 15, 16, 15])
    group = AttentionGroup(slice(0, 8), torch.arange(4), positions, 2, 18, True, bits)
    assert group.tree_in(None)[1].tolist() == bits.tolist() == [0b1, 0b11, 0b111, 0b1001] * 2
    roots, seen = group.tree_in(7)
    assert roots.tolist() == [5] * 4 + [14] * 4
    assert seen.tolist() == [0b1, 0b11, 0b100, 0b1001, 0b1, 0b11, 0b111, 0b1001]
    assert group.tree_in(3)[1].tolist() == [0b1, 0b10, 0b110, 0b1000, 0b1, 0b10, 0b110, 0b1000]


def test_blocks_that_are_filled_or_were_begun_before_are_not_cleared():
    assert build_batch([entry("A", 0, 8, [1, 2])], BLOCK, CPU).fresh_blocks == ()
    assert build_batch([entry("A", 5, 2, [1, 2])], BLOCK, CPU).fresh_blocks == ()
    assert build_batch([entry("A", 3, 4, [1, 2])], BLOCK, CPU).fresh_blocks == (2,)


def test_long_and_short_tables_are_padded_apart():
    entries = [entry("A", 3, 1, [0]), entry("B", 500, 1, list(range(130))), entry("C", 10, 1, [0, 1, 2])]
    groups = [[e.sequence.id for e in group] for group in group_entries(entries, BLOCK)]
    assert groups == [["A", "C"], ["B"]]


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=8))
def test_every_token_once_and_padding_at_most_doubles(spans):
    entries = [entry(chr(65 + n), start, count, list(range(100))) for n, (start, count) in enumerate(spans)]
    batch = build_batch(entries, BLOCK, CPU)
    assert len(batch.token_ids) == sum(count for _, count in spans)
    assert [group.rows.start for group in batch.groups[1:]] == [group.rows.stop for group in batch.groups[:-1]]
    for group in batch.groups:
        padded = len(group.blocks) // group.num_sequences
        lengths = (group.positions.view(group.num_sequences, -1)[:, -1] + 1).tolist()
        assert all(padded <= max(16, 2 * -(-length // BLOCK)) for length in lengths)
