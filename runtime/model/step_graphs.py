"""Steps in which every sequence has one token, recorded once per batch size and run again: no Python between kernels.

A step of n sequences runs in the smallest recorded size that holds them. Sizes are recorded when they are first needed,
because recording all of them at start takes longer than loading the model.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from runtime.batch import Batch
from runtime.model.captures import Capture, Computation
from runtime.model.step_buffers import StepBuffers
from runtime.step import ScheduledSequence

logger = logging.getLogger("runtime.graphs")

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)


class StepGraphs:
    """Recorded steps over one set of buffers.

    Args:
        compute: logits `[B, V]` of the B rows of a batch.
        capture: how steps are recorded.

    Attributes:
        sizes: numbers of rows that are recorded, in order.
        failure: why no other size is recorded any more; empty while nothing went wrong.
    """

    def __init__(self, compute: Callable[[Batch], Tensor], buffers: StepBuffers, capture: Capture) -> None:
        self.buffers = buffers
        self.sizes = batch_sizes(buffers.num_rows)
        self.failure = ""
        self._compute, self._capture = compute, capture
        self._recorded: dict[int, Computation] = {}

    def refuse(self, entries: Sequence[ScheduledSequence]) -> str:
        """Why a step of these entries cannot be run here, in few words; empty when it can."""
        if len(entries) > self.buffers.num_rows:
            return "too many sequences"
        if any(entry.num_draft_tokens for entry in entries):
            return "drafts are verified"
        if any(entry.num_tokens > 1 or not entry.samples for entry in entries):
            return "prompts are computed"
        if any(entry.sequence.wants_whole_prompt for entry in entries):
            return "prompts are looked at"
        return "" if self._size(entries) in self._recorded else self.failure

    def run(self, entries: Sequence[ScheduledSequence]) -> Tensor:
        """Logits `[n, V]` of n entries that are not refused, in their order; good until the next call."""
        size = self._size(entries)
        self.buffers.fill(entries, size)
        step = self._recorded.get(size) or self._record(size)
        step()
        return self.buffers.logits[: len(entries)]

    def _size(self, entries: Sequence[ScheduledSequence]) -> int:
        return self.sizes[bisect_left(self.sizes, len(entries))]

    def _record(self, size: int) -> Computation:
        """The recorded step of a size; the step itself where recording fails."""
        step = partial(self._write_logits, self.buffers.batch(size), self.buffers.logits[:size])
        try:
            recorded = self._recorded[size] = self._capture(step)
        except RuntimeError as error:  # an operation that cannot be recorded, or no memory for one more graph
            self.failure = "recording failed"
            logger.warning("no step of %d sequences or another new number is recorded any more: %s", size, error)
            return step
        return recorded

    def _write_logits(self, batch: Batch, logits: Tensor) -> None:
        logits.copy_(self._compute(batch))


def batch_sizes(limit: int) -> tuple[int, ...]:
    """Of recorded steps of up to `limit` sequences: close enough that less than half of the rows are padding."""
    sizes = list(SMALL_SIZES)
    while sizes[-1] < limit:
        # 48, 64, 96, 128, 192, 256, ...
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 else sizes[-1] * 4 // 3)
    return (*(size for size in sizes if size < limit), limit)
