"""A server of the dense model, with OpenAI's API, as a teacher: black-box distillation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.common.errors import DataError
from compress.evaluate.server import ServerScorer


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """A server that reports the most likely tokens of prompts, of all positions but the last.

    Attributes:
        vocab_size: of the model that is trained.
    """

    scorer: ServerScorer
    vocab_size: int

    def targets(self, tokens: Tensor, micro_batch: int, count: int) -> Iterator[dict[str, Tensor]]:
        """Yields targets; see `Teacher`. Positions have as many tokens as are known of each. Raises DataError: the
        server does not score prompts, or has another tokenizer."""
        for rows in tokens.split(micro_batch):
            known = self.scorer.states(rows)
            if (largest := int(known.tokens.max())) >= self.vocab_size:
                problem = f"the server knows token {largest}, and the model has {self.vocab_size} tokens"
                raise DataError(problem, "Name a server of a model with the same tokenizer")
            fewest = int((known.tokens >= 0).sum(-1).min())
            logp, places = known.logp.topk(min(count, fewest), dim=-1)
            yield {"log_probabilities": logp.float(), "indices": known.tokens.gather(-1, places).to(torch.int32)}
