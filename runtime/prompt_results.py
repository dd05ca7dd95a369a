"""What the steps of one request found out about its prompt, joined over chunks and preemptions. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite, isnan

from runtime.step import ScheduledSequence, StepOutput
from runtime.types import Delta, TokenLogprobs


@dataclass(slots=True)
class PromptResults:
    """Log-probabilities of the prompt's tokens but the first, and the sum of its final hidden states."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_sum: list[float] = field(default_factory=list)

    def add(self, entry: ScheduledSequence, output: StepOutput) -> None:
        """Takes what a step computed of the prompt. Spans come in order, and from the start after a preemption."""
        sequence_id = entry.sequence.id
        logprobs, sums = output.prompt_logprobs.get(sequence_id, []), output.hidden_sums.get(sequence_id, [])
        if entry.start == 0:
            self.logprobs, self.hidden_sum = list(logprobs), list(sums)
        else:
            self.logprobs += logprobs
            self.hidden_sum = [total + new for total, new in zip(self.hidden_sum, sums, strict=True)]

    @property
    def error(self) -> str:
        """Why they are worth nothing, or nothing."""
        if all(map(isfinite, self.hidden_sum)) and not any(isnan(found.logprob) for found in self.logprobs):
            return ""
        return "the model's hidden states are not finite (NaN or infinity)"

    def put_into(self, delta: Delta) -> Delta:
        """The delta with what was found."""
        mean = [total / delta.num_prompt_tokens for total in self.hidden_sum]
        return replace(delta, prompt_logprobs=self.logprobs, embedding=mean or None)
