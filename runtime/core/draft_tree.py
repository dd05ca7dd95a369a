"""Trees of draft tokens: token ids, and parent indices with -1 for the last known token. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def chain(count: int) -> list[int]:
    """Returns the parents of `count` draft tokens that form a chain."""
    return list(range(-1, count - 1))


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Returns the path from the root to each draft token, as indices."""
    found: list[list[int]] = []
    for number, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), number])
    return found


def depth(parents: Sequence[int]) -> int:
    """Returns the number of tokens in the longest branch."""
    return max(map(len, paths(parents)), default=0)


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """Returns tree attention masks of the known token (bit 0) and of each draft token: itself and its ancestors."""
    return [1, *(1 | sum(2 << number for number in path) for path in paths(parents))]


def grow_tree(branches: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[int], list[int]]:
    """Merges branches into one draft, the first branch first; returns its tokens and their parents.

    Parents are empty if the draft is a chain. At most `max_tokens` tokens are kept.
    """
    if len(branches) == 1:
        return list(branches[0][:max_tokens]), []
    draft: list[int] = []
    parents: list[int] = []
    for branch in branches:
        number = -1
        for token_id in branch:
            known = find_child(draft, parents, number, token_id)
            if known is None:
                if len(draft) == max_tokens:
                    break
                draft.append(token_id)
                parents.append(number)
                known = len(draft) - 1
            number = known
    return draft, [] if parents == chain(len(parents)) else parents


def follow(draft: Sequence[int], parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """Returns the indices of the draft tokens along a path of sampled tokens, up to the first that is not in the
    draft."""
    path: list[int] = []
    for token_id in token_ids:
        number = find_child(draft, parents, path[-1] if path else -1, token_id)
        if number is None:
            break
        path.append(number)
    return path


def find_child(draft: Sequence[int], parents: Sequence[int], number: int, token_id: int) -> int | None:
    """Returns the index of a draft token with this id and this parent, if there is one."""
    children = range(number + 1, len(draft))
    return next((child for child in children if parents[child] == number and draft[child] == token_id), None)
