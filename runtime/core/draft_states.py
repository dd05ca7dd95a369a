"""Choice of recurrent states of draft tokens to store. No torch.

A draft token may be rejected, and a recurrent state cannot be rolled back. Either the state after every draft token is
written to its own slot, and no token is computed twice; or only the state after the last one is written. If then some
but not all draft tokens are accepted, the sequence continues after its last known token and recomputes the accepted
ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateCosts:
    """Costs of storing states of draft tokens, in bytes of memory traffic.

    Attributes:
        write_bytes: bytes written per state of one sequence.
        token_bytes: bytes whose transfer takes as long as computing one more token in a step.
    """

    write_bytes: int = 0
    token_bytes: int = 0


def num_draft_states(num_drafts: int, num_free: int, costs: StateCosts) -> int:
    """Returns the number of draft tokens, counted from the last, whose states are written: all, one, or none without a
    free slot.

    Args:
        num_drafts: number of draft tokens, at least 1.
        num_free: number of free slots.
    """
    if num_free < num_drafts:
        return min(num_free, 1)
    saved = (num_drafts - 1) * costs.write_bytes
    return 1 if tokens_computed_again(num_drafts) * costs.token_bytes < saved else num_drafts


def tokens_computed_again(num_drafts: int) -> float:
    """Returns the mean number of accepted tokens to recompute if only the last draft token has a state, assuming all
    numbers of accepted tokens are equally likely."""
    return num_drafts * (num_drafts - 1) / 2 / (num_drafts + 1)
