"""Which recurrent states of draft tokens are worth a slot. No torch.

A draft token may be rejected, and a recurrent state cannot be taken back. So either each draft token has the state
behind it written to a slot of its own, and nothing is computed twice; or only the last one has, and where some but not
all draft tokens are accepted, the sequence goes on behind its last known token and computes the accepted ones again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateCosts:
    """Costs of states of draft tokens, in bytes of memory traffic.

    Attributes:
        write_bytes: of the state of one sequence.
        token_bytes: that take as long as computing one more token in a step.
    """

    write_bytes: int = 0
    token_bytes: int = 0


def num_draft_states(num_drafts: int, num_free: int, costs: StateCosts) -> int:
    """Returns how many draft tokens of a sequence, the last ones, have their states written: all, or one; none without
    a free slot.

    Args:
        num_drafts: one at least.
        num_free: slots for them.
    """
    if num_free < num_drafts:
        return min(num_free, 1)
    saved = (num_drafts - 1) * costs.write_bytes
    return 1 if tokens_computed_again(num_drafts) * costs.token_bytes < saved else num_drafts


def tokens_computed_again(num_drafts: int) -> float:
    """Returns how many draft tokens are accepted but computed again on average, where only the last one has a state and
    each number of accepted ones is as likely as the others."""
    return num_drafts * (num_drafts - 1) / 2 / (num_drafts + 1)
