"""Answers of a cascade's small model, held back until its confidence is known."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace

from runtime.core.request import Delta, SamplingParams
from runtime.routing.routes import Cascade, Confidence
from runtime.server.answers import Deltas


class LowConfidenceError(Exception):
    """The small model is not confident: the large one is to answer."""


@dataclass(frozen=True, slots=True)
class ConfidenceGate:
    """Holds the answers to one request back."""

    cascade: Cascade

    def scored(self, sampling: SamplingParams) -> SamplingParams:
        """Returns sampling parameters with the log-probabilities of tokens."""
        return sampling if sampling.logprobs is not None else replace(sampling, logprobs=0)

    async def hold(self, deltas: Deltas, num_answers: int, with_logprobs: bool) -> Deltas:
        """Yields the deltas, once those that decide are there.

        Args:
            with_logprobs: whether the request asks for log-probabilities; else they are removed.

        Raises:
            LowConfidenceError: the answers are not kept. Nothing was yielded.
        """
        confidence, held = Confidence(self.cascade, num_answers), list[Delta]()
        async with aclosing(deltas):
            async for group in deltas:
                if not confidence.is_decided:
                    for delta in group:
                        scores = [each.logprob for each in delta.logprobs]
                        confidence.note(delta.index, scores, delta.finish_reason is not None)
                    held += group
                    if not confidence.is_decided:
                        continue
                    if not confidence.is_high:
                        raise LowConfidenceError
                    group, held = held, []
                for delta in () if with_logprobs else group:
                    delta.logprobs = []
                yield group
