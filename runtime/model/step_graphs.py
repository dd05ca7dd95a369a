"""Steps in which every sequence has one token, recorded once per batch size and run again: no Python between kernels.

A step of n sequences runs in the smallest recorded size that holds them. Its last kernels draw the tokens: two, or many
where somebody wants top-k, top-p or min-p; hence steps without have recordings of their own. Each is made when it is
first needed, because making all of them at start takes longer than loading the model.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from runtime.batch import Batch
from runtime.model.captures import Capture, Computation
from runtime.model.step_buffers import StepBuffers
from runtime.sampler.gpu import DrawStep
from runtime.step import ScheduledSequence

logger = logging.getLogger("runtime.graphs")

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)


class _Kind(NamedTuple):
    """Of steps that one recording serves: rows, and whether somebody may want top-k, top-p or min-p."""

    size: int
    truncates: bool


class StepGraphs:
    """Recorded steps over one set of buffers.

    Args:
        compute: logits `[B, V]` of the B rows of a batch, in any dtype.
        capture: how steps are recorded.
        draw: draws tokens from logits within the step; None leaves that to who reads the logits.

    Attributes:
        sizes: numbers of rows that are recorded, in order.
        failure: why no other kind of step is recorded any more; empty while nothing went wrong.
    """

    def __init__(
        self, compute: Callable[[Batch], Tensor], buffers: StepBuffers, capture: Capture, draw: DrawStep | None
    ) -> None:
        self.buffers = buffers
        self.sizes = batch_sizes(buffers.num_rows)
        self.failure = ""
        self._compute, self._capture, self._draw = compute, capture, draw
        self._recorded: dict[_Kind, Computation] = {}

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
        return "" if self._kind(entries) in self._recorded else self.failure

    def run(self, entries: Sequence[ScheduledSequence]) -> tuple[Tensor, Tensor | None]:
        """Of n entries that are not refused, in their order: logits `[n, V]`, and what `draw` made of them, int64
        `[n]`; good until the next call."""
        kind, count = self._kind(entries), len(entries)
        self.buffers.fill(entries, kind.size)
        step = self._recorded.get(kind) or self._record(kind)
        step()
        return self.buffers.logits[:count], self.buffers.tokens[:count] if self._draw else None

    def _kind(self, entries: Sequence[ScheduledSequence]) -> _Kind:
        size = self.sizes[bisect_left(self.sizes, len(entries))]
        truncates = any(entry.sequence.request.sampling.is_truncated for entry in entries)
        return _Kind(size, truncates and self._draw is not None)

    def _record(self, kind: _Kind) -> Computation:
        """The recorded step of a kind; the step itself where recording fails."""
        step = partial(self._step, self.buffers.batch(kind.size), kind)
        try:
            recorded = self._recorded[kind] = self._capture(step)
        except RuntimeError as error:  # an operation that cannot be recorded, or no memory for one more graph
            self.failure = "recording failed"
            logger.warning("no step of %d sequences or another new kind is recorded any more: %s", kind.size, error)
            return step
        return recorded

    def _step(self, batch: Batch, kind: _Kind) -> None:
        logits, tokens = self.buffers.logits[: kind.size], self.buffers.tokens[: kind.size]
        logits.copy_(self._compute(batch))
        if self._draw is not None:
            self._draw(logits, logits, self.buffers.wishes(kind.size), kind.truncates, tokens)


def batch_sizes(limit: int) -> tuple[int, ...]:
    """Of recorded steps of up to `limit` sequences: close enough that less than half of the rows are padding."""
    sizes = list(SMALL_SIZES)
    while sizes[-1] < limit:
        # 48, 64, 96, 128, 192, 256, ...
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 else sizes[-1] * 4 // 3)
    return (*(size for size in sizes if size < limit), limit)
