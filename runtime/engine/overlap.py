"""Overlapped scheduling: the next step is planned and submitted while a step is computed, and before its output is
read. No torch.

The next step continues each sequence with the token that the step in flight samples; the runner takes it from the
device. A step is planned ahead only if its plan equals the one that would be made after reading the step in flight,
which keeps answers, their order and all numbers identical; otherwise the step is read first, and the reason is counted.
If a sequence turns out to have ended (an end token, a stop string, an abort), its extra token is discarded. Its write
to a block is harmless, because the next owner of the block writes later: plans run in the order of submission.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """Submitted step whose output has not been read.

    Attributes:
        plan: plan with the entries whose results are used.
        rows: indices of these entries among all submitted ones.
    """

    plan: StepPlan
    rows: tuple[int, ...]
    submitted: SubmittedStep

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


def continued_rows(step: StepInFlight) -> dict[Sequence, int]:
    """Returns the sequences that may continue after the step, with their rows in it, without those that reach
    `max_tokens`.
    """
    return {
        entry.sequence: row
        for row, entry in zip(step.rows, step.plan.entries, strict=True)
        if entry.sequence.num_output_tokens + 1 < entry.sequence.request.sampling.max_tokens
    }


def unsupported_reason(step: StepInFlight, num_continued: int, scheduler: Scheduler) -> str:
    """Returns a short reason why the step must be read before the next one is planned; empty if overlap is possible."""
    if scheduler.states is not None:
        return "recurrent states are saved"
    if scheduler.pool.tier.num_slots:
        return "blocks move to host memory"
    # The entries of a step that was planned ahead were checked at that time.
    known = (entry.sequence for entry in step.plan.entries if entry.source_row == KNOWN)
    if reason := next(filter(None, map(_reason, known)), ""):
        return reason
    if len(step.plan.entries) < len(scheduler.running):
        return "other sequences run"
    if not num_continued:
        return "every sequence ends"
    return "a sequence may enter" if scheduler.may_admit(num_continued) else ""


def _reason(sequence: Sequence) -> str:
    """Returns the reason why the token of a sequence, or its logits, are needed before its next step."""
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
