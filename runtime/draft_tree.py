"""Drafts that are trees: several guesses of what follows the same tokens, verified in one step. No torch.

A draft is a list of tokens and, for each, the number of its parent in that list: smaller than its own, -1 where it
follows the last known token. Without parents it is a chain, in which each token follows the one before it. Known token
and draft lie side by side in the cache, in this order; a token of a tree sees the known tokens, and of the draft its
ancestors and itself. The first child of each token comes right behind it, so a right first branch lies where it stays.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf


def chain(count: int) -> list[int]:
    """Parents in a draft that is no tree."""
    return list(range(-1, count - 1))


def paths(parents: ListOf[int]) -> list[list[int]]:
    """For each token of a draft the numbers of its ancestors, the oldest first, and its own."""
    found: list[list[int]] = []
    for number, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), number])
    return found


def depth(parents: ListOf[int]) -> int:
    """Tokens of the longest branch."""
    return max(map(len, paths(parents)), default=0)


def ancestor_bits(parents: ListOf[int]) -> list[int]:
    """What the known token, bit 0, and each token of the draft see of these: themselves and their ancestors."""
    return [1, *(1 | sum(2 << number for number in path) for path in paths(parents))]


def grow_tree(branches: ListOf[ListOf[int]], max_tokens: int) -> tuple[list[int], list[int]]:
    """The draft, and its parents, that begins with the first branch and has the others' tokens where they differ. No
    parents where that is a chain; branches that exceed `max_tokens` are cut."""
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


def follow(draft: ListOf[int], parents: ListOf[int], said: ListOf[int]) -> list[int]:
    """Numbers of the draft's tokens that were said, one after the other; the last token said need not be among them."""
    path: list[int] = []
    for token_id in said:
        number = find_child(draft, parents, path[-1] if path else -1, token_id)
        if number is None:
            break
        path.append(number)
    return path


def find_child(draft: ListOf[int], parents: ListOf[int], number: int, token_id: int) -> int | None:
    """The guess that this token follows that one."""
    children = range(number + 1, len(draft))
    return next((child for child in children if parents[child] == number and draft[child] == token_id), None)
