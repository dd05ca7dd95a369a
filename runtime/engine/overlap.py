"""Overlap: while a step is computed, the next one is planned and submitted, and then the first is read. No torch.

The next step continues each sequence by the token that the step in flight draws for it; the runner takes that from the
device. It is planned only where its plan is the one that would be made after the step is read, so that answers, their
order and all numbers are the same; else the step is read first, and the reason counted. A sequence that ends by what it
said (an end token, a stop string, an abort) was continued in vain: its token is thrown away. What that wrote into its
block is no harm, because the block's next owner writes later: plans are computed in the order in which they are
submitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.core.request import Sequence, Status
from runtime.core.step import KNOWN, ScheduledSequence, StepOutput, StepPlan, SubmittedStep
from runtime.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that could not be submitted; its requests fail when it is read."""

    error: Exception
    feeds_next: bool = False

    def result(self) -> StepOutput:
        raise self.error


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A submitted step that is not read yet.

    Attributes:
        plan: with the entries whose results count.
        rows: their places among all entries that were submitted.
    """

    plan: StepPlan
    rows: tuple[int, ...]
    submitted: SubmittedStep

    def without_ended(self) -> StepInFlight | None:
        """Returns the step without sequences that have ended or lost their place; None if none is left."""
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


def continued_rows(step: StepInFlight) -> dict[Sequence, int]:
    """Returns the sequences that may go on after the step, with their rows in it: not those that reach `max_tokens`."""
    return {
        entry.sequence: row
        for row, entry in zip(step.rows, step.plan.entries, strict=True)
        if entry.sequence.num_output_tokens + 1 < entry.sequence.request.sampling.max_tokens
    }


def unsupported_reason(step: StepInFlight, num_continued: int, scheduler: Scheduler) -> str:
    """Says in few words why the step has to be read before the next one is planned; empty when it need not be."""
    if scheduler.states is not None:
        return "recurrent states are saved"
    if scheduler.pool.tier.num_slots:
        return "blocks move to host memory"
    # What is in a step that was planned ahead was looked at then.
    known = (entry.sequence for entry in step.plan.entries if entry.source_row == KNOWN)
    if reason := next(filter(None, map(_reason, known)), ""):
        return reason
    if len(step.plan.entries) < len(scheduler.running):
        return "other sequences run"
    if not num_continued:
        return "every sequence ends"
    return "a sequence may enter" if scheduler.may_admit(num_continued) else ""


def _reason(sequence: Sequence) -> str:
    """Says why the token of a sequence, or what it was drawn from, is needed before its next step."""
    sampling = sequence.request.sampling
    if sequence.constraint is not None:
        return "a grammar is followed"
    if sampling.has_penalties:
        return "penalties count tokens"
    if sampling.needs_tokens:
        return "tokens are filtered by the host"
    if sampling.logprobs is not None:
        return "log-probabilities are read"
    if sequence.needs_logits:
        return "a token was not decided"
    return "" if sequence.num_output_tokens else "first tokens are read"
