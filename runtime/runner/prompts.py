"""Results of steps for whole prompts: log-probabilities of their tokens, and pooled hidden states."""

from __future__ import annotations

from torch import Tensor

from runtime.backends.model import Model
from runtime.core.batch import Batch
from runtime.core.request import LogprobColumns, Pooling
from runtime.core.step import ScheduledSequence
from runtime.sampling.sampler import Sampler

LOGITS_AT_ONCE = 2**23
"""Logits that exist at a time at most, one row at least: those of a whole long prompt would fill the memory."""


def prompt_logprobs(decoder: Model, sampler: Sampler, hidden: Tensor, batch: Batch) -> dict[str, LogprobColumns]:
    """By sequence id, of the tokens that follow those of the span inside the prompt.

    Args:
        hidden: `[T, H]` before the final norm.
    """
    return {
        entry.sequence.id: _span_logprobs(decoder, sampler, hidden[rows], entry, number)
        for entry, rows in batch.prompt_rows
        if (number := entry.sequence.request.sampling.prompt_logprobs) is not None
    }


def pooled_states(decoder: Model, hidden: Tensor, batch: Batch) -> dict[str, list[float]]:
    """By sequence id, sums `[H]` of the spans' final hidden states in float64, or the last of them.

    Args:
        hidden: `[T, H]` before the final norm.
    """
    return {
        entry.sequence.id: pool(decoder.final_norm(hidden[rows]).double(), pooling).tolist()
        for entry, rows in batch.prompt_rows
        if (pooling := entry.sequence.request.options.pooling)
    }


def pool(states: Tensor, pooling: Pooling) -> Tensor:
    """The sum `[H]` of states `[T, H]`, or the last of them."""
    return states[-1] if pooling is Pooling.LAST else states.sum(0)


def _span_logprobs(
    decoder: Model, sampler: Sampler, hidden: Tensor, entry: ScheduledSequence, num_top: int
) -> LogprobColumns:
    """Log-probabilities of the tokens after those of `hidden [T, H]`; the prompt's last token has none after it."""
    start = entry.start + 1
    following = entry.sequence.request.prompt_token_ids[start : start + len(hidden)]
    step = max(1, LOGITS_AT_ONCE // decoder.config.spec.vocab_size)
    found = LogprobColumns()
    for first in range(0, len(following), step):
        chosen = following[first : first + step]
        logits = decoder.logits(hidden[first : first + len(chosen)])
        found.extend(sampler.logprob_columns(logits, chosen, num_top))
    return found
