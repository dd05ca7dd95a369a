"""Which guesses hold, by match: the target draws its own tokens, and those that agree with the draft are kept.

Each row of a span draws from the distribution that the target gives after the tokens and guesses before it, with the
noise of its own position: where the draft is a tree, of the position that its branch gives it. A draw counts only
while all guesses before it were drawn too, so every token that is kept is exactly the one that would have been drawn
without a draft; the draft only decides how many are drawn in one step.
No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from runtime.core.step import SampledToken, ScheduledSequence, find_child


def verify_by_match(
    entries: Iterable[ScheduledSequence], drawn: Iterable[SampledToken]
) -> dict[str, list[SampledToken]]:
    """Tokens by sequence id: the draws that equal a branch of the draft, and the first one that does not or follows it.

    Args:
        entries: that sample.
        drawn: `1 + num_draft_tokens` for each entry, in order.
    """
    rest = iter(drawn)
    return {entry.sequence.id: _agreed(entry, list(islice(rest, 1 + entry.num_draft_tokens))) for entry in entries}


def _agreed(entry: ScheduledSequence, drawn: list[SampledToken]) -> list[SampledToken]:
    parents = entry.draft_parents
    draft = entry.sequence.draft_token_ids[: len(parents)]
    said, guess = drawn[:1], find_child(draft, parents, -1, drawn[0].token_id)
    while guess is not None:
        said.append(drawn[guess + 1])
        guess = find_child(draft, parents, guess, said[-1].token_id)
    return said
