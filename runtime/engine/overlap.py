"""Overlapped scheduling: the next step is planned and submitted while a step is computed, and before its output is
read. No torch.

The next step is planned as if the one in flight were complete: prompts continue and enter, and each sequence that
samples continues with a token that the runner takes from the device. The plan differs from the one that would be made
after reading only where a sequence reaches `max_tokens`: it keeps its place and its blocks for one more step. Where a
token or its logits decide what is computed next, or a sequence would be preempted, the step is read first, and the
reason is counted.

If a sequence turns out to have ended (an end token, a stop string, an abort), its extra token is discarded. Its write
to a block or a recurrent state is harmless, because the next owner of the block or slot writes later: plans run in the
order of submission. A token that was not decided is computed again, for which its sequence keeps the blocks inside the
window of that token; with a recurrent state, which is overwritten, the sequence is preempted. If the step in flight
fails, the sequences of the next one that remain are preempted: they may share blocks with those that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from runtime.core.request import Sequence, Status
from runtime.core.step import KNOWN, ScheduledSequence, StepOutput, StepPlan, SubmittedStep
from runtime.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class FailedStep:
    """Step that could not be submitted; its requests fail when it is read."""

    error: Exception
    feeds_next: bool = False

    def result(self) -> StepOutput:
        raise self.error


@dataclass(slots=True)
class StepInFlight:
    """Submitted step whose output has not been read.

    Attributes:
        plan: plan with the entries whose results are used.
        rows: indices of these entries among all submitted ones.
        is_complete: whether the scheduler counts it as complete.
    """

    plan: StepPlan
    rows: tuple[int, ...]
    submitted: SubmittedStep
    is_complete: bool = False

    def without_ended(self) -> StepInFlight | None:
        """Returns the step without sequences that have ended or were preempted; None if none remains."""
        kept = [pair for pair in zip(self.rows, self.plan.entries, strict=True) if _is_current(pair[1])]
        if len(kept) == len(self.rows):
            return self
        if not kept:
            return None
        rows, entries = zip(*kept, strict=True)
        return StepInFlight(replace(self.plan, entries=entries), rows, self.submitted)


def _is_current(entry: ScheduledSequence) -> bool:
    sequence = entry.sequence
    return sequence.status is Status.RUNNING and sequence.num_computed_tokens == entry.start


UNKNOWN = 0
"""Token id that stands for a sampled token while the next step is planned."""


def plan_ahead(step: StepInFlight, scheduler: Scheduler) -> tuple[StepPlan, str]:
    """Plans the step after one in flight, which the scheduler then counts as complete.

    Returns:
        Plan and "", or an empty plan and a short reason why the step in flight must be read first.
    """
    if reason := _unsupported_reason(step, scheduler):
        return StepPlan(()), reason
    scheduler.complete(step.plan)
    step.is_complete = True
    rows = {entry.sequence: row for row, entry in zip(step.rows, step.plan.entries, strict=True) if entry.samples}
    with _assumed_tokens(step.plan.entries):
        if scheduler.would_preempt():
            return StepPlan(()), "a sequence is preempted"
        plan = scheduler.schedule()
    for entry in plan.entries:
        entry.source_row = rows.get(entry.sequence, KNOWN)
    return plan, "" if plan.entries else "every sequence ends"


@contextmanager
def _assumed_tokens(entries: tuple[ScheduledSequence, ...]) -> Iterator[None]:
    """Appends a token to each sequence of a step that continues after it, and holds those that end, meanwhile."""
    ended = {entry.sequence for entry in entries if _ends(entry)}
    sampled = [entry.sequence for entry in entries if entry.samples and entry.sequence not in ended]
    for sequence in ended:
        sequence.is_held = True
    for sequence in sampled:
        sequence.token_ids.append(UNKNOWN)
    try:
        yield
    finally:
        for sequence in ended:
            sequence.is_held = False
        for sequence in sampled:
            sequence.token_ids.pop()


def _ends(entry: ScheduledSequence) -> bool:
    """Returns whether nothing of a sequence is left to compute after an entry, whatever its token is."""
    sequence = entry.sequence
    if entry.start + entry.num_tokens < sequence.num_tokens:
        return False
    return not entry.samples or sequence.num_output_tokens + 1 >= sequence.request.sampling.max_tokens


def _unsupported_reason(step: StepInFlight, scheduler: Scheduler) -> str:
    """Returns a short reason why the step must be read before the next one is planned; empty if overlap is possible."""
    # A sequence whose token comes from the step before was checked at that time.
    sampling = (entry.sequence for entry in step.plan.entries if entry.source_row == KNOWN and entry.samples)
    has_states = scheduler.states is not None
    return next(filter(None, (_token_reason(sequence, has_states) for sequence in sampling)), "")


def _token_reason(sequence: Sequence, has_states: bool) -> str:
    """Returns the reason why the token of a sequence, or its logits, are needed before its next step."""
    sampling = sequence.request.sampling
    if sequence.constraint is not None:
        return "a grammar is followed"
    if sampling.needs_tokens:
        return "tokens are filtered by the host"
    if sequence.needs_logits:
        return "a token was not decided"
    if has_states and sampling.may_need_all:
        return "a token may not be decided"  # and is drawn again only after its whole text is computed again
    return "other answers begin" if sampling.n > 1 and not sequence.num_output_tokens else ""
