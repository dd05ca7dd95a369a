"""Captured decoding steps, one graph for each kind of step."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.core.batch import Batch, SamplingMetadata, SamplingTensors, build_sampling_metadata, upload
from runtime.core.step import ScheduledSequence
from runtime.runner.capture import Capture, Computation
from runtime.runner.pending_step import DrawnTokens
from runtime.runner.step_buffers import StepBuffers, StepShape
from runtime.sampling.adjustment_buffers import AdjustmentBuffers
from runtime.sampling.sampler import Drawn, SampleStep

logger = logging.getLogger("runtime.graphs")

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)
FEW_ROWS = 64
"""Tokens that take about as long as one: reading the weights takes longer than computing."""


class StepResult(NamedTuple):
    """Results of a captured step, good until the next one.

    Attributes:
        logits: `[n, V]` of the n tokens of its entries, in their order.
        drawn: what `draw` made of them; None leaves that to who reads the logits.
        failure: why the step ran without being captured; empty if it was.
    """

    logits: Tensor
    drawn: Drawn | None
    failure: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Draws:
    """Number of rows that tokens are drawn from, whether some use top-k, top-p or min-p, and whether the logits of some
    are changed before."""

    num_rows: int
    truncates: bool
    adjusts: bool = False


Kind = StepShape | Draws
"""Kind of step, or of drawing, with a graph of its own."""


class StepGraphs:
    """Captured steps over one set of buffers.

    What draws tokens is captured apart from what computes logits, so that ways of drawing do not multiply the graphs
    of whole models.

    Args:
        compute: logits `[T, V]` of the T rows of a batch, in any dtype.
        capture: how steps are captured.
        draw: draws tokens from logits; None leaves that to who reads the logits.

    Attributes:
        sizes: numbers of sequences that are captured, in order.
        draft_sizes: numbers of draft tokens of each that are captured, in order, 0 first.
        failure: why nothing else is captured any more; empty while nothing went wrong.
    """

    def __init__(
        self, compute: Callable[[Batch], Tensor], buffers: StepBuffers, capture: Capture, draw: SampleStep | None
    ) -> None:
        self.buffers = buffers
        self.sizes = batch_sizes(buffers.num_sequences)
        self.draft_sizes = draft_sizes(buffers.num_drafts)
        self.failure = ""
        self._compute, self._capture, self._draw = compute, capture, draw
        self._adjustments: AdjustmentBuffers | None = None
        if draw is not None:
            sizes = buffers.num_rows, buffers.num_sequences, buffers.num_drafts, buffers.logits.shape[-1]
            self._adjustments = AdjustmentBuffers(*sizes, buffers.logits.dtype, buffers.logits.device)
        self._captured: dict[Kind, Computation] = {}
        self._kept: list[Computation] = []

    def unsupported_reason(self, entries: Sequence[ScheduledSequence]) -> str:
        """Why no captured step computes these entries, in few words; empty when one can."""
        reasons = (self._entry_reason(entry) for entry in entries if not _is_decode(entry))
        if reason := next(filter(None, reasons), ""):
            return reason
        if len(entries) > self.buffers.num_sequences:
            return "too many sequences"
        if not self._fits(entries):
            return "too many drafts"
        return self.failure if self.failure and self._shape(entries) not in self._captured else ""

    def run(self, entries: Sequence[ScheduledSequence], before: DrawnTokens | None = None) -> StepResult:
        """Computes entries that have no `unsupported_reason`.

        Args:
            before: tokens of the step before, for entries that take theirs from it.
        """
        shape = self._shape(entries)
        compute = self.capture(shape)
        self.buffers.fill(entries, shape)
        if before is not None:
            rows = range(0, shape.num_rows, 1 + shape.num_drafts)[: len(entries)]
            before.put_into(self.buffers.token_ids, rows, entries)
        compute()
        rows = _rows(entries, shape, self.buffers.logits.device)
        drawn = None
        if self._adjustments is not None and not any(e.sequence.request.sampling.needs_tokens for e in entries):
            # The device computes logits meanwhile: masks are made now, not before.
            draws = list(map(build_sampling_metadata, entries))
            self._draw_tokens(self._adjustments, entries, draws, shape)
            drawn = Drawn(self.buffers.tokens[rows], draws)
        failure = "" if shape in self._captured else self.failure
        return StepResult(self.buffers.logits[rows], drawn, failure)

    def _draw_tokens(
        self,
        adjustments: AdjustmentBuffers,
        entries: Sequence[ScheduledSequence],
        draws: list[list[SamplingMetadata]],
        shape: StepShape,
    ) -> None:
        truncates = any(group[0].sampling.is_truncated for group in draws)
        adjusts = any(draw.changes_logits for group in draws for draw in group)
        if adjusts:
            adjustments.fill(entries, draws, 1 + shape.num_drafts)
        self.capture(Draws(shape.num_rows, truncates, adjusts))()

    @property
    def kinds(self) -> list[Kind]:
        """Everything that may be captured, the largest first: its memory serves the others."""
        trees = (False, True) if self.buffers.has_trees else (False,)
        shapes = [
            StepShape(size, number, has_trees and number > 0)
            for size, number, has_trees in product(self.sizes, self.draft_sizes, trees)
            if size * (1 + number) <= self.buffers.num_rows
        ]
        rows = {shape.num_rows for shape in shapes} if self._draw is not None else set[int]()
        draws = [Draws(number, *ways) for number, *ways in product(rows, (False, True), (False, True))]
        return [
            *sorted(set(shapes), key=lambda shape: shape.num_rows, reverse=True),
            *sorted(draws, reverse=True),
        ]

    @property
    def is_complete(self) -> bool:
        """Whether all of it is captured."""
        return all(kind in self._captured for kind in self.kinds)

    def launch(self, kind: Kind) -> None:
        """Launches a kind of step over rows of padding, or what draws its tokens, without capturing it."""
        self._computation(kind)()

    def capture(self, kind: Kind) -> Computation:
        """Captures a kind of step, or what draws its tokens. Returns it, and where nothing can be captured any more the
        computation itself.

        Steps are captured with rows of padding: a recurrent state must not advance with every run.
        """
        if kind in self._captured:
            return self._captured[kind]
        compute = self._computation(kind)
        if self.failure:
            return compute
        try:
            captured = self._captured[kind] = self._capture(compute)
        except RuntimeError as error:  # an operation that cannot be captured, or no memory for one more graph
            self.failure = "capture failed"
            logger.warning("%s failed to be captured, and no other new kind of step is: %s", kind, error)
            return compute
        self._kept.append(compute)  # a graph has the addresses of the tensors that this holds
        return captured

    def _computation(self, kind: Kind) -> Computation:
        if isinstance(kind, StepShape):
            self.buffers.fill((), kind)
            return partial(self._compute_logits, self.buffers.batch(kind))
        if self._draw is None or self._adjustments is None:
            raise ValueError(f"{kind}: tokens are drawn by who reads the logits")
        return partial(
            self._draw_rows, self._draw, self._adjustments, kind, self.buffers.sampling_tensors(kind.num_rows)
        )

    def _entry_reason(self, entry: ScheduledSequence) -> str:
        """Why no captured step computes an entry, in few words; empty when one can."""
        if entry.sequence.wants_whole_prompt:
            return "prompts are looked at"
        if entry.num_tokens - entry.num_draft_tokens > 1 or not entry.samples:
            return "prompts are computed"
        if entry.num_draft_tokens > self.draft_sizes[-1]:
            return "too many drafts"
        # Slots of states are few, or writing them takes longer than computing accepted drafts again.
        keeps_all = not entry.state_writes or len(entry.state_writes) == entry.num_tokens
        return "" if keeps_all else "states of drafts are left out"

    def _fits(self, entries: Sequence[ScheduledSequence]) -> bool:
        """Whether entries with drafts, padded to the longest one, are few rows or less than half padding."""
        if all(entry.num_tokens == 1 for entry in entries):
            return True
        most = max(FEW_ROWS, 2 * sum(entry.num_tokens for entry in entries))
        return self._shape(entries).num_rows <= min(most, self.buffers.num_rows)

    def _shape(self, entries: Sequence[ScheduledSequence]) -> StepShape:
        size = self.sizes[bisect_left(self.sizes, len(entries))]
        num_drafts = max(entry.num_tokens for entry in entries) - 1
        if not num_drafts:
            return StepShape(size)
        longest = self.draft_sizes[bisect_left(self.draft_sizes, num_drafts)]
        return StepShape(size, longest, any(entry.has_tree for entry in entries))

    def _draw_rows(
        self, draw: SampleStep, adjustments: AdjustmentBuffers, kind: Draws, tensors: SamplingTensors
    ) -> None:
        logits, tokens = self.buffers.logits[: kind.num_rows], self.buffers.tokens[: kind.num_rows]
        draw(logits, adjustments.adjust(logits) if kind.adjusts else logits, tensors, kind.truncates, tokens)

    def _compute_logits(self, batch: Batch) -> None:
        self.buffers.logits[: len(batch.token_ids)].copy_(self._compute(batch))


def _is_decode(entry: ScheduledSequence) -> bool:
    """Whether a captured step computes an entry without drafts."""
    return entry.num_tokens == 1 and entry.samples and not entry.sequence.wants_whole_prompt


def _rows(entries: Sequence[ScheduledSequence], shape: StepShape, device: torch.device) -> slice | Tensor:
    """Rows of the entries among those of padding."""
    each = 1 + shape.num_drafts
    if all(entry.num_tokens == each for entry in entries):
        return slice(0, each * len(entries))
    return upload((i * each + row for i, entry in enumerate(entries) for row in range(entry.num_tokens)), device)


def draft_sizes(limit: int) -> tuple[int, ...]:
    """Numbers of draft tokens of captured steps, up to `limit`: 0, powers of two, and the limit itself."""
    return (0, *(2**power for power in range(limit.bit_length()) if 2**power < limit), *([limit] if limit else []))


def batch_sizes(limit: int) -> tuple[int, ...]:
    """Sizes of captured steps of up to `limit` sequences: close enough that less than half of the rows are padding."""
    sizes = list(SMALL_SIZES)
    while sizes[-1] < limit:
        # 48, 64, 96, 128, 192, 256, ...
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 else sizes[-1] * 4 // 3)
    return (*(size for size in sizes if size < limit), limit)
