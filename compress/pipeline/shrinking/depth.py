"""Choice of whole blocks to remove.

`influence` is ShortGPT's (Men et al. 2024, https://arxiv.org/abs/2403.03853, section 3.2): one less the mean cosine
between what enters a block and what leaves it. `kl` takes the divergence of the logits from those of the dense model,
and removes one block after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.pipeline.capture import BlockInputs
from compress.pipeline.distillation.streamed_model import StreamedModel
from compress.pipeline.distillation.targets import top_divergence
from compress.stages.shrink import SAMPLE_TOKENS

TOP_K = 256
"""Likeliest tokens of a position whose probabilities are compared; all others count as one."""

Scores = Mapping[int, float]
"""Costs of the removal of a block, by its number."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Sequences that scores are measured on.

    Attributes:
        tokens: `[N, L]`.
        inputs: of the blocks, in micro-batches.
    """

    model: StreamedModel
    tokens: Tensor
    inputs: BlockInputs

    @classmethod
    def of(cls, model: StreamedModel, tokens: Tensor, micro_batch: int) -> Sample:
        few = tokens[: -(-SAMPLE_TOKENS // tokens.shape[1])]
        return cls(model, few, model.capture(few, micro_batch))

    @property
    def numbers(self) -> range:
        """Micro-batches."""
        return range(len(self.inputs.calls))

    def influences(self) -> Scores:
        """Returns the influence of every block, of one pass."""
        found, before = dict[int, float](), list[Tensor]()
        for index, states in enumerate(self.model.hidden_states(self.inputs, self.numbers), -1):
            if before:
                pairs = zip(before, states, strict=True)
                cosines = [torch.cosine_similarity(left.float(), right.float(), dim=-1) for left, right in pairs]
                found[index] = 1 - float(torch.cat([each.flatten() for each in cosines]).mean())
            before = states
        return found

    def targets(self) -> list[dict[str, Tensor]]:
        """Returns the likeliest tokens of the dense model, by micro-batch."""
        return [*self.model.targets(self.tokens, self.inputs.micro_batch, TOP_K)]

    @torch.no_grad()
    def divergences(
        self,
        blocks: Sequence[int],
        candidates: Sequence[int],
        targets: Sequence[dict[str, Tensor]],
        tick: Callable[[float], None],
    ) -> Scores:
        """Returns the KL of the model of `blocks` without each of the candidates, in nats per token, of one pass that
        reads each block once."""
        numbers = [*self.numbers]
        streams = {-1: [self.inputs.hidden[self.inputs.rows(number)].to(self.model.device) for number in numbers]}
        for done, index in enumerate(blocks):
            states = [each for stream in streams.values() for each in stream]
            states = self.model.advance(self.inputs, index, numbers * len(streams), states)
            left_out = {index: streams[-1]} if index in candidates else {}
            parts = (states[first : first + len(numbers)] for first in range(0, len(states), len(numbers)))
            streams = dict(zip(streams, parts, strict=True)) | left_out
            tick((done + 1) / len(blocks))
        outside, total = self.model.outside(), self.tokens.numel()
        return {
            each: sum(
                float(top_divergence(self._logits(outside, number, hidden), targets[number]))
                for number, hidden in enumerate(streams[each])
            )
            / total
            for each in candidates
        }

    @torch.no_grad()
    def _logits(self, outside: Mapping[str, Tensor], number: int, hidden: Tensor) -> Tensor:
        return self.model.logits(outside, self.tokens[self.inputs.rows(number)], hidden)
