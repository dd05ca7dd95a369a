"""Decides how many tokens to draft, and whether drafting pays at all; both are measured, not configured. No torch.

* `Window` predicts one sequence: a moving average of how many of its draft tokens were accepted, rounded up. Where
  hardly any is accepted it asks for none, and now and then for a single one to detect a change.
* `Gate` decides for the whole batch. Verifying is cheap while a step is bound by memory bandwidth and costs its full
  share once it is bound by compute, which depends on machine, model, batch size and drafter. The gate compares tokens
  per second with and without drafting for each batch size (in powers of two), takes the better way, and tries both
  again in every period. Steps in which the drafter had nothing to propose, or had to catch up first, are not counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean, median
from typing import NamedTuple, Protocol

from runtime.core.draft_tree import depth
from runtime.core.request import Sequence
from runtime.core.step import ScheduledSequence, StepPlan

WEIGHT = 0.25
"""Weight of the newest observation in the moving average of accepted draft tokens."""
HOPELESS = 0.25
"""Accepted draft tokens per step below which a sequence is not drafted for."""
PROBE_EVERY = 16
"""Steps between two probes of a sequence that is not drafted for; a probe is one draft token."""

PERIOD = 256
"""Steps after which the gate tries both ways again."""
TRIAL = 4
"""Steps of a trial. The first is not measured: it pays for the change, such as a draft model that catches up."""
MEMORY = 16
"""Measured steps that count; older ones say little about the present text and load."""


@dataclass(slots=True)
class Window:
    """Draft length of one sequence: at most `longest` tokens, of which `expected` will be accepted."""

    longest: int
    expected: float
    num_skipped: int = 0

    def next(self) -> int:
        """Returns how many tokens to draft."""
        if self.expected >= HOPELESS:
            return min(self.longest, ceil(self.expected))
        self.num_skipped += 1
        return int(self.num_skipped % PROBE_EVERY == 0)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Records one step; `num_drafts` is the depth of a tree. If all were accepted, one more might have been."""
        seen = num_accepted + (num_accepted == num_drafts)
        self.expected += WEIGHT * (seen - self.expected)


@dataclass(slots=True)
class Rate:
    """Tokens and seconds of the last measured steps."""

    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=MEMORY))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def note(self, tokens: int, seconds: float) -> None:
        """Records one step."""
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    @property
    def per_second(self) -> float:
        """Mean tokens by median time, which is robust against a single slow step; 0 if unknown."""
        seconds = median(self.seconds) if self.seconds else 0.0
        return fmean(self.tokens) / seconds if seconds > 0 else 0.0


@dataclass(slots=True)
class Trials:
    """Rates with and without drafting at one batch size. A period begins with a trial of each; then the better runs."""

    drafting: Rate = field(default_factory=Rate)
    plain: Rate = field(default_factory=Rate)
    num_steps: int = 0

    def next(self) -> bool:
        """Returns whether to draft in the next step."""
        phase = self.num_steps % PERIOD
        if phase < 2 * TRIAL:
            return phase < TRIAL
        return self.drafting.per_second >= self.plain.per_second

    def advance(self, drafted: bool) -> None:
        """Counts a step. A trial of drafting only counts steps with draft tokens."""
        self.num_steps += drafted or self.num_steps % PERIOD >= TRIAL


class Gate:
    """Turns drafting off where it does not pay. Call `allows` before a step and `note` after it."""

    def __init__(self) -> None:
        self._trials: dict[int, Trials] = {}
        self._current = Trials()
        self._drafts = False
        self._changed = True

    def allows(self, batch_size: int) -> bool:
        """Returns whether to draft in a step with `batch_size` sequences."""
        trials = self._trials.setdefault(batch_size.bit_length(), Trials())
        drafts = trials.next()
        self._changed = trials is not self._current or drafts != self._drafts
        self._current, self._drafts = trials, drafts
        return drafts

    def note(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Records the tokens and seconds of a step, drafting included.

        Args:
            drafted: the step had draft tokens.
        """
        if not self._changed and drafted == self._drafts:
            (self._current.drafting if drafted else self._current.plain).note(num_tokens, seconds)
        self._current.advance(drafted)


class DraftRequest(NamedTuple):
    """A sequence that the next step decodes, and how many tokens to draft for it at most; 0 is none."""

    sequence: Sequence
    num_tokens: int


class Drafter(Protocol):
    """Proposes continuations. A wrong draft token costs time and changes no output: see
    `runtime.speculative.verify`."""

    def propose(self, requests: ListOf[DraftRequest]) -> None:
        """Sets `draft_token_ids` of every requested sequence, to at most the number of tokens asked for.

        State that the drafter keeps for a sequence may be dropped once the sequence is no longer requested.
        """


class Speculator:
    """Has tokens drafted for the sequences that the next step decodes.

    Args:
        drafter: proposes the tokens.
        num_draft_tokens: most draft tokens per sequence and step.
        gate: turns drafting off where it does not pay; None always drafts.
        before: called before tokens are drafted for a step.
        clock: seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_draft_tokens: int,
        gate: Gate | None = None,
        *,
        before: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.gate = gate
        self._before, self._clock = before, clock
        self._started = 0.0
        self._windows: dict[Sequence, Window] = {}

    def propose(self, decodes: ListOf[Sequence]) -> None:
        """Sets the drafts of all sequences that the next step decodes."""
        self._started = self._clock()
        self._before()
        if not decodes:
            return
        known = self._windows
        self._windows = {sequence: known.get(sequence) or self._new_window() for sequence in decodes}
        drafts = self.gate is None or self.gate.allows(len(decodes))
        self.drafter.propose([DraftRequest(each, self._num_tokens(each) if drafts else 0) for each in decodes])
        for sequence in decodes:
            _cut_forbidden(sequence)

    def note(self, plan: StepPlan, num_accepted: Mapping[str, int]) -> None:
        """Learns from a computed step; call it before the plan is completed.

        Args:
            num_accepted: accepted draft tokens by the ids of the sequences that sampled.
        """
        seconds = self._clock() - self._started
        for entry in plan.entries:
            if entry.num_draft_tokens:
                self._windows[entry.sequence].note(depth(entry.draft_parents), num_accepted[entry.sequence.id])
        if self.gate is not None and all(map(self._is_decode, plan.entries)):
            num_tokens = sum(1 + num_accepted[entry.sequence.id] for entry in plan.entries)
            self.gate.note(num_tokens, seconds, drafted=any(entry.num_tokens > 1 for entry in plan.entries))

    def _is_decode(self, entry: ScheduledSequence) -> bool:
        """Whether a span has one token and drafts, and before it at most accepted drafts that are computed again."""
        num_known = entry.num_tokens - entry.num_draft_tokens
        is_output = num_known == 1 or entry.start >= entry.sequence.num_prompt_tokens
        return entry.samples and is_output and num_known <= 1 + self.num_draft_tokens

    def _new_window(self) -> Window:
        return Window(self.num_draft_tokens, expected=self.num_draft_tokens / 2)

    def _num_tokens(self, sequence: Sequence) -> int:
        # The token after the last accepted draft token comes for free, so the last one before `max_tokens` needs none.
        room = sequence.request.sampling.max_tokens - sequence.num_output_tokens - 1
        return min(self._windows[sequence].next(), room) if room else 0


def _cut_forbidden(sequence: Sequence) -> None:
    """Drops draft tokens from the first that the sequence's grammar forbids. Such a sequence has no tree."""
    if sequence.constraint is not None and sequence.draft_token_ids:
        num_allowed = sequence.constraint.accept(sequence.draft_token_ids)
        sequence.constraint.rollback(num_allowed)
        sequence.keep_drafts(num_allowed)
