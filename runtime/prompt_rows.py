"""What requests want to know about the tokens of their prompt, from the hidden states of one step."""

from __future__ import annotations

from torch import Tensor

from runtime.batch import Batch
from runtime.model.decoder import Decoder
from runtime.sampler.logprobs import token_logprobs
from runtime.step import ScheduledSequence
from runtime.types import TokenLogprobs

LOGITS_AT_ONCE = 2**23
"""Logits that exist at a time at most, one row at least: those of a whole long prompt would fill the memory."""


def prompt_logprobs(decoder: Decoder, hidden: Tensor, batch: Batch) -> dict[str, list[TokenLogprobs]]:
    """By sequence id, of the tokens that follow those of the span inside the prompt.

    Args:
        hidden: `[T, H]` before the final norm.
    """
    return {
        entry.sequence.id: _span_logprobs(decoder, hidden[rows], entry, number)
        for entry, rows in batch.prompt_rows
        if (number := entry.sequence.request.sampling.prompt_logprobs) is not None
    }


def hidden_sums(decoder: Decoder, hidden: Tensor, batch: Batch) -> dict[str, list[float]]:
    """By sequence id, sums `[H]` of the spans' final hidden states, in float64.

    Args:
        hidden: `[T, H]` before the final norm.
    """
    return {
        entry.sequence.id: decoder.final_norm(hidden[rows]).double().sum(0).tolist()
        for entry, rows in batch.prompt_rows
        if entry.sequence.request.options.embed
    }


def _span_logprobs(decoder: Decoder, hidden: Tensor, entry: ScheduledSequence, num_top: int) -> list[TokenLogprobs]:
    """Of the tokens after those of `hidden [T, H]`; the prompt's last token has none after it."""
    start = entry.start + 1
    following = entry.sequence.request.prompt_token_ids[start : start + len(hidden)]
    step = max(1, LOGITS_AT_ONCE // decoder.config.vocab_size)
    found: list[TokenLogprobs] = []
    for first in range(0, len(following), step):
        chosen = following[first : first + step]
        logits = decoder.logits(hidden[first : first + len(chosen)])
        found += token_logprobs(logits, chosen, num_top)
    return found
