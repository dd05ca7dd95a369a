"""Draft trees: merging of branches, attention among their tokens, and the accepted branch."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.batch import build_sampling_metadata
from runtime.core.draft_tree import ancestor_bits, chain, depth, find_child, follow, grow_tree, paths
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import SampledToken, ScheduledSequence
from runtime.speculative.verify import verify_by_match

BRANCHES = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=5)


def entry_of(draft: list[int], parents: list[int], **options: float) -> ScheduledSequence:
    request = Request("a", (5, 6, 7), SamplingParams(**options), seed=1)
    sequence = Sequence(request, [5, 6, 7, 8], draft_token_ids=draft, draft_parents=parents)
    return ScheduledSequence(sequence, 3, 1 + len(draft))


def test_a_second_branch_begins_where_it_differs() -> None:
    draft, parents = grow_tree([[1, 2, 3], [1, 4, 5], [6]], 16)
    assert draft == [1, 2, 3, 4, 5, 6]
    assert parents == [-1, 0, 1, 0, 3, -1]
    assert paths(parents) == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [5]]
    assert depth(parents) == 3
    assert [bin(bits) for bits in ancestor_bits(parents)] == [
        "0b1", "0b11", "0b111", "0b1111", "0b10011", "0b110011", "0b1000001",
    ]  # fmt: skip


def test_branches_that_agree_are_a_chain_without_parents() -> None:
    assert grow_tree([[1, 2, 3], [1, 2]], 16) == ([1, 2, 3], [])
    assert grow_tree([], 16) == ([], [])


@given(BRANCHES, st.integers(0, 12))
def test_a_tree_has_each_branch_once_and_may_be_cut_anywhere(branches: list[list[int]], max_tokens: int) -> None:
    draft, parents = grow_tree(branches, 100)
    all_parents = parents or chain(len(draft))
    told = [tuple(draft[number] for number in path) for path in paths(all_parents)]
    assert len(set(told)) == len(told)
    assert set(told) == {tuple(branch[:end]) for branch in branches for end in range(1, len(branch) + 1)}
    cut, cut_parents = grow_tree(branches, max_tokens)
    if len(draft) <= max_tokens or not parents:
        assert cut == draft[:max_tokens]
    assert all(parent < number for number, parent in enumerate(cut_parents))


@given(BRANCHES, st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_what_is_kept_is_what_drawing_token_by_token_says(branches: list[list[int]], said: list[int]) -> None:
    """Each row draws what follows its branch: here the next of `said` where the branch is its beginning, else 9."""
    draft, parents = grow_tree(branches, 16)
    entry = entry_of(draft, parents)
    told = [[], *([draft[number] for number in path] for path in paths(entry.draft_parents))]
    right = [*said, 9]
    drawn = [SampledToken(right[len(t)] if t == said[: len(t)] and len(t) < len(right) else 9) for t in told]
    kept = [token.token_id for token in verify_by_match([entry], drawn)["a"]]
    assert kept == right[: len(kept)]
    assert len(kept) == max(len(t) for t in told if t == said[: len(t)]) + 1
    path = follow(draft, entry.draft_parents, kept)
    assert [draft[number] for number in path] == kept[:-1]
    assert path == sorted(path)


def test_rows_are_drawn_at_the_positions_of_their_branches() -> None:
    draws = build_sampling_metadata(entry_of([1, 2, 3, 4], [-1, 0, 0, -1], presence_penalty=1.0))
    assert [draw.position for draw in draws] == [4, 5, 6, 6, 5]
    assert [draw.output_token_ids for draw in draws] == [[8], [8, 1], [8, 1, 2], [8, 1, 3], [8, 4]]


def test_dropping_guesses_leaves_a_tree() -> None:
    sequence = entry_of([1, 2, 3, 4], [-1, 0, 0, -1]).sequence
    sequence.keep_drafts(3)
    assert (sequence.draft_token_ids, sequence.draft_parents) == ([1, 2, 3], [-1, 0, 0])
    assert find_child([1, 2, 3], [-1, 0, 0], 0, 3) == 2
    sequence.keep_drafts(0)
    assert (sequence.draft_token_ids, sequence.draft_parents) == ([], [])
