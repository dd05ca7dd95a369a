"""Joins a drafter with the policy of when and how far to guess: what the engine calls around a step. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from runtime.draft_tree import depth
from runtime.speculative.base import Drafter
from runtime.speculative.controller import Gate, Window
from runtime.step import StepPlan
from runtime.types import Sequence


class Speculator:
    """Has guesses made for the sequences that decode next.

    Args:
        drafter: makes them.
        num_draft_tokens: guesses per sequence and step at most.
        gate: switches guessing off where it does not pay; None guesses always.
        clock: seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_draft_tokens: int,
        gate: Gate | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.gate = gate
        self._clock = clock
        self._started = 0.0
        self._windows: dict[Sequence, Window] = {}

    def propose(self, decodes: ListOf[Sequence]) -> None:
        """Sets the drafts of all sequences that the next step decodes."""
        self._started = self._clock()
        if not decodes:
            return
        known = self._windows
        self._windows = {sequence: known.get(sequence) or self._new_window() for sequence in decodes}
        guesses = self.gate is None or self.gate.allows(len(decodes))
        self.drafter.propose([(sequence, self._wish(sequence) if guesses else 0) for sequence in decodes])
        for sequence in decodes:
            _cut_forbidden(sequence)

    def note(self, plan: StepPlan, num_accepted: Mapping[str, int]) -> None:
        """Learns from a step that was computed; call it before the plan is completed.

        Args:
            num_accepted: draft tokens, by the ids of the sequences that sampled.
        """
        seconds = self._clock() - self._started
        for entry in plan.entries:
            if entry.num_draft_tokens:
                self._windows[entry.sequence].note(depth(entry.draft_parents), num_accepted[entry.sequence.id])
        only_decodes = all(entry.samples and entry.num_tokens == 1 + entry.num_draft_tokens for entry in plan.entries)
        if self.gate is not None and only_decodes:
            num_tokens = sum(1 + num_accepted[entry.sequence.id] for entry in plan.entries)
            self.gate.note(num_tokens, seconds, guessed=any(entry.num_draft_tokens for entry in plan.entries))

    def _new_window(self) -> Window:
        return Window(self.num_draft_tokens, expected=self.num_draft_tokens / 2)

    def _wish(self, sequence: Sequence) -> int:
        # The token behind the last accepted guess comes for free, so the last one before `max_tokens` needs no guess.
        room = sequence.request.sampling.max_tokens - sequence.num_output_tokens - 1
        return min(self._windows[sequence].next(), room) if room else 0


def _cut_forbidden(sequence: Sequence) -> None:
    """Nothing behind a guess that the sequence's grammar forbids can be accepted. Such a sequence has no tree."""
    if sequence.constraint is not None and sequence.draft_token_ids:
        num_allowed = sequence.constraint.accept(sequence.draft_token_ids)
        sequence.constraint.rollback(num_allowed)
        sequence.keep_drafts(num_allowed)
