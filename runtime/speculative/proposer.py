"""How many tokens to guess, and whether to guess at all. Measured, not configured. No torch.

Two questions, two answers:

* How far is this sequence predictable? `Window` keeps a moving average of how many guesses were accepted and asks for
  that many, rounded up. Where hardly any is accepted it asks for none, and for one now and then to see whether that
  has changed.
* Does it pay? Verifying guesses is cheap while a step waits for memory and costs as much as anything else when it
  computes, which depends on machine, model, batch size and drafter. `Gate` compares tokens per second with and without
  guesses, for each size of the batch (in powers of two), and takes the better; in every period of steps it tries both.
  Steps for which the drafter had no guess, or had to catch up first, are no evidence for either.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean, median
from typing import Protocol

from runtime.core.request import Sequence
from runtime.core.step import StepPlan, depth

WEIGHT = 0.25
"""Of the newest observation in the moving average of accepted guesses."""
HOPELESS = 0.25
"""Fewer accepted guesses per step than this are not worth guessing for."""
PROBE_EVERY = 16
"""Steps without guesses between two with a single one, where it was hopeless."""

PERIOD = 256
"""Steps after which both ways are tried again."""
TRIAL = 4
"""Steps of a trial. The first is not measured: it pays for the change, such as a draft model that catches up."""
MEMORY = 16
"""Measured steps that count: old ones say nothing about the present text and load."""


@dataclass(slots=True)
class Window:
    """Of one sequence: `longest` guesses at most, `expected` accepted ones."""

    longest: int
    expected: float
    num_skipped: int = 0

    def next(self) -> int:
        """How many guesses to ask for."""
        if self.expected >= HOPELESS:
            return min(self.longest, ceil(self.expected))
        self.num_skipped += 1
        return int(self.num_skipped % PROBE_EVERY == 0)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """One step's outcome; of a tree `num_drafts` is the depth. When all were accepted one more might have been."""
        seen = num_accepted + (num_accepted == num_drafts)
        self.expected += WEIGHT * (seen - self.expected)


@dataclass(slots=True)
class Rate:
    """Tokens and seconds of the last steps."""

    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=MEMORY))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def note(self, tokens: int, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    @property
    def per_second(self) -> float:
        """Mean tokens by the median time, which one step that waited for the processor does not move; 0 is unknown."""
        seconds = median(self.seconds) if self.seconds else 0.0
        return fmean(self.tokens) / seconds if seconds > 0 else 0.0


@dataclass(slots=True)
class Trials:
    """Both ways, at one size of the batch. Every period begins with a trial of each; then the better one runs."""

    guessing: Rate = field(default_factory=Rate)
    plain: Rate = field(default_factory=Rate)
    num_steps: int = 0

    def next(self) -> bool:
        """Whether to guess in the next step."""
        phase = self.num_steps % PERIOD
        if phase < 2 * TRIAL:
            return phase < TRIAL
        return self.guessing.per_second >= self.plain.per_second

    def advance(self, guessed: bool) -> None:
        """A step is done. A trial of guessing waits for guesses."""
        self.num_steps += guessed or self.num_steps % PERIOD >= TRIAL


class Gate:
    """Switches guessing off where it does not pay. Ask `allows` before a step and tell `note` after it."""

    def __init__(self) -> None:
        self._trials: dict[int, Trials] = {}
        self._current = Trials()
        self._guesses = False
        self._changed = True

    def allows(self, batch_size: int) -> bool:
        """Whether to guess in a step with this many sequences."""
        trials = self._trials.setdefault(batch_size.bit_length(), Trials())
        guesses = trials.next()
        self._changed = trials is not self._current or guesses != self._guesses
        self._current, self._guesses = trials, guesses
        return guesses

    def note(self, num_tokens: int, seconds: float, *, guessed: bool) -> None:
        """The step gave so many tokens in so many seconds, drafting included; `guessed`: there were guesses."""
        if not self._changed and guessed == self._guesses:
            (self._current.guessing if guessed else self._current.plain).note(num_tokens, seconds)
        self._current.advance(guessed)


Wish = tuple[Sequence, int]
"""A sequence that decodes in the next step, and how many tokens to guess for it at most; 0 is none."""


class Drafter(Protocol):
    """Guesses how sequences go on. A wrong guess costs time and never changes a token, see
    `runtime.speculative.verify`."""

    def propose(self, wishes: ListOf[Wish]) -> None:
        """Sets `draft_token_ids` of every sequence of `wishes`; fewer than wished for, or none, is fine.

        Whatever the drafter keeps for a sequence it may forget when that sequence is not among them any more.
        """
        ...


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
