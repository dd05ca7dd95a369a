"""A drafter's view of one sequence: its tokens, then the draft tokens of the last round."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.core.request import Sequence
from runtime.core.step import SampledToken, ScheduledSequence

StateSlots = tuple[int, int]
"""Slots for recurrent states of a drafter: after all known tokens but the last, and after the last computed token.
The last known token is computed in every round, so no draft token has to be taken back."""


@dataclass(eq=False, slots=True)
class Shadow:
    """The draft model's state of one sequence.

    Attributes:
        own: the sequence's tokens, then the draft tokens of the last round; blocks of the drafter's pool.
        num_known: tokens of `own` before the draft tokens.
        state_slots: for recurrent states; None for a drafter without them.
        state_tokens: tokens before the state in the first of them.
    """

    own: Sequence
    num_known: int = 0
    state_slots: StateSlots | None = None
    state_tokens: int = 0

    @classmethod
    def of(cls, sequence: Sequence, noise: int) -> Shadow:
        """Makes the shadow of a sequence, whose seed is mixed with `noise`; 0 samples with the target's noise."""
        request = sequence.request
        sampling = replace(request.sampling, logprobs=None, prompt_logprobs=None)
        return cls(Sequence(replace(request, sampling=sampling, seed=request.seed ^ noise), []))

    def follow(self, sequence: Sequence) -> None:
        """Copies tokens added since the last round; keys and values of accepted draft tokens stay valid."""
        own, known = self.own, sequence.token_ids
        agree = self.num_known
        while agree < min(len(known), own.num_tokens) and own.token_ids[agree] == known[agree]:
            agree += 1
        own.token_ids[agree:] = known[agree:]
        # The last token is always computed: its logits are needed.
        own.num_computed_tokens = min(own.num_computed_tokens, agree, len(known) - 1)
        if self.state_slots is not None:
            own.num_computed_tokens = self.state_tokens
        self.num_known = len(known)
        own.constraint = sequence.constraint

    def plan(self, num_tokens: int) -> ScheduledSequence:
        """Plans the next tokens of `own`, and what becomes of their recurrent states."""
        start = self.own.num_computed_tokens
        entry = ScheduledSequence(self.own, start, num_tokens)
        if self.state_slots is not None:
            kept, passing = self.state_slots
            if start:
                entry.state_read = kept if start == self.state_tokens else passing
            stop, last = start + num_tokens, min(start + num_tokens, self.num_known - 1)
            if last > start:
                entry.state_writes, self.state_tokens = ((last - start - 1, kept),), last
            if stop > last:
                entry.state_writes += ((num_tokens - 1, passing),)
        return entry

    def take(self, drawn: list[SampledToken] | None) -> bool:
        """Appends a draft token; returns False if there is none or the grammar forbids it."""
        if drawn is None or drawn[0].error:
            return False
        constraint = self.own.constraint
        if constraint is not None and not constraint.accept([drawn[0].token_id]):
            return False
        self.own.token_ids.append(drawn[0].token_id)
        return True

    def take_back(self) -> None:
        """Rolls the sequence's constraint back to before the draft tokens."""
        if self.own.constraint is not None:
            self.own.constraint.rollback(len(self.draft))

    @property
    def draft(self) -> list[int]:
        """Draft tokens of this round."""
        return self.own.token_ids[self.num_known :]
