"""Calibration data passing through the blocks of a run, in micro-batches that shrink if memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from compress.common.workers import Workers
from compress.pipeline.block import BlockJob, LoadedBlock, load_block, release
from compress.pipeline.capture import BlockInputs, Calibration, capture_inputs
from compress.pipeline.memory import with_smaller_batches
from compress.pipeline.prepare import RunContext
from compress.pipeline.resume import Progress, RunDisplay

# Share and minimum number of calibration tokens for searches, which take dozens of passes over them.
_SEARCH_SHARE, _MIN_SEARCH_TOKENS = 1 / 32, 512


class PassedOn(Protocol):
    """Result of processing a block: `hidden [N, L, H]`, the inputs of the next block, and `reference`, those of the
    dense model if a method needs them."""

    hidden: Tensor | None
    reference: Tensor | None


Outcome = TypeVar("Outcome", bound=PassedOn)
BlockWork = Callable[[LoadedBlock, BlockJob, Calibration, Workers, Callable[[str, float], None]], Outcome]


class CalibratedRunner(Generic[Outcome]):
    """Runner that passes calibration data from block to block.

    Args:
        work: function that processes a block; its result holds the inputs of the next.
        progress: progress folder, which holds the inputs of block `done`.
        embedding: function that returns a replacement of the stored embedding `[V, H]`, if any.

    Attributes:
        micro_batch: sequences per forward pass; halved if memory runs out, and recorded with every block, so a resumed
            run computes the same values as an uninterrupted one.
        passed_on: see `BlockInputs.passed_on`.
    """

    def __init__(
        self,
        context: RunContext,
        work: BlockWork[Outcome],
        progress: Progress,
        done: int,
        display: RunDisplay,
        embedding: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._context = context
        self._embedding = embedding
        self._work = work
        self._tokens = context.tokens
        self._display = display
        self._rows = _search_rows(self._tokens)
        self._hidden: Tensor | None = progress.load_hidden(done) if done else None
        self._reference: Tensor | None = progress.load_reference(done) if done else None
        self.passed_on: dict[str, Tensor] = progress.load_passed_on(done) if done else {}
        self._calibration: Calibration | None = None
        self.micro_batch = progress.facts(done - 1)["micro_batch"] if done else context.micro_batch

    def run(self, index: int) -> Outcome:
        """Processes block `index` and keeps its outputs as inputs of the next."""
        outcome = with_smaller_batches(lambda size: self._attempt(index, size), self.micro_batch, self._retry)
        self._hidden, self._reference = outcome.hidden, outcome.reference
        return outcome

    def _attempt(self, index: int, micro_batch: int) -> Outcome:
        context, job = self._context, BlockJob.of(self._context, index)
        module = context.skeleton.blocks[index]
        try:
            if self._calibration is None:
                self._display.step("embedding")
                self._calibration = self._capture(micro_batch)
            self._display.step("loading")
            block = load_block(
                context.skeleton, context.files, index, set(job.layer_plans), context.device, context.dtype
            )
            outcome = self._work(block, job, self._calibration, context.workers, self._display.step)
            if outcome.hidden is not None:
                self._calibration.advance(outcome.hidden, outcome.reference)
                self.passed_on = self._calibration.inputs.passed_on()
                self._calibration.pass_on(self.passed_on, context.device)
            return outcome
        finally:
            release(module)
            context.files.release()

    def _retry(self, micro_batch: int) -> None:
        self._display.say(f"out of memory: trying again with {micro_batch} sequences at a time")
        self.micro_batch = micro_batch
        self._calibration = None

    def _capture(self, micro_batch: int) -> Calibration:
        """Returns the arguments of all blocks, and the current hidden states."""
        inputs = self._capture_tokens(self._tokens, micro_batch, self._embedding())
        search = self._capture_tokens(self._tokens[self._rows], micro_batch, self._embedding())
        calibration = Calibration(inputs, search, self._rows)
        if batch := self._context.plan.needs.learning_batch:
            calibration.tuning = self._capture_tokens(self._tokens, min(micro_batch, batch), None)
            calibration.reference = calibration.tuning.hidden
            calibration.tuning.hidden = inputs.hidden
        elif self._context.plan.needs.dense_model:
            calibration.reference = self._capture_tokens(self._tokens, micro_batch, None).hidden
        if self._hidden is not None:
            calibration.advance(self._hidden, self._reference)
            calibration.pass_on(self.passed_on, self._context.device)
        return calibration

    def _capture_tokens(self, tokens: Tensor, micro_batch: int, embedding: Tensor | None) -> BlockInputs:
        context = self._context
        inputs = capture_inputs(
            context.skeleton, context.files, tokens, micro_batch, context.device, context.dtype, embedding
        )
        return replace(inputs, tokens_per_channel=context.request.tokens_per_channel)


def _search_rows(tokens: Tensor) -> Tensor:
    """Returns evenly spaced sequences for searches; the choice does not depend on the micro-batch."""
    count, length = tokens.shape
    wanted = max(count * length * _SEARCH_SHARE, _MIN_SEARCH_TOKENS)
    return torch.linspace(0, count - 1, min(count, max(1, round(wanted / length)))).round().long()
