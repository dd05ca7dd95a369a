"""Captured steps, one graph for each kind of step."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.core.batch import Batch, SamplingMetadata, SamplingTensors, build_sampling_metadata, upload
from runtime.core.step import ScheduledSequence
from runtime.runner.capture import Capture, Computation
from runtime.runner.pending_step import DrawnTokens, unread_token
from runtime.runner.step_buffers import PromptShape, Shape, StepBuffers, StepShape
from runtime.sampling.adjustment_buffers import AdjustmentBuffers
from runtime.sampling.sampler import Drawn, SampleStep

logger = logging.getLogger("runtime.graphs")

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)
LEAST_PROMPT_ROWS = 32
"""Tokens of the smallest captured step with prompts."""
FEW_ROWS = 64
"""Tokens that take about as long as one: reading the weights takes longer than computing."""


class StepResult(NamedTuple):
    """Results of a captured step, good until the next one.

    Attributes:
        entries: those that sample, in the order of their logits.
        logits: `[n, V]` of their n tokens.
        drawn: what `draw` made of them; None leaves that to who reads the logits.
        failure: why the step ran without being captured; empty if it was.
    """

    entries: Sequence[ScheduledSequence]
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


Kind = Shape | Draws
"""Kind of step, or of drawing, with a graph of its own."""


class StepGraphs:
    """Captured steps over one set of buffers.

    What draws tokens is captured apart from what computes logits, so that ways of drawing do not multiply the graphs
    of whole models.

    Args:
        compute: logits of all rows of a batch, or of its `sample_rows` if it has any, in any dtype.
        capture: how steps are captured.
        draw: draws tokens from logits; None leaves that to who reads the logits.

    Attributes:
        sizes: numbers of sequences that are captured, in order.
        draft_sizes: numbers of draft tokens of each that are captured, in order, 0 first.
        prompt_sizes: numbers of tokens of steps with prompts that are captured, in order.
        failure: why nothing else is captured any more; empty while nothing went wrong.
    """

    def __init__(
        self, compute: Callable[[Batch], Tensor], buffers: StepBuffers, capture: Capture, draw: SampleStep | None
    ) -> None:
        self.buffers = buffers
        self.sizes = batch_sizes(buffers.num_sequences)
        self.draft_sizes = draft_sizes(buffers.num_drafts)
        self.prompt_sizes = prompt_sizes(buffers.num_prompt_rows)
        self.failure = ""
        self._compute, self._capture, self._draw = compute, capture, draw
        self._adjustments: AdjustmentBuffers | None = None
        if draw is not None:
            sizes = buffers.num_logits, buffers.num_sequences, buffers.num_drafts, buffers.logits.shape[-1]
            self._adjustments = AdjustmentBuffers(*sizes, buffers.logits.dtype, buffers.logits.device)
        self._captured: dict[Kind, Computation] = {}
        self._kept: list[Computation] = []

    def unsupported_reason(self, entries: Sequence[ScheduledSequence]) -> str:
        """Why no captured step computes these entries, in few words; empty when one can."""
        if any(entry.sequence.wants_whole_prompt for entry in entries):
            return "prompts are looked at"
        if any(entry.sequence.request.adapter is not None for entry in entries):
            return "adapters"
        if len(entries) > self.buffers.num_sequences:
            return "too many sequences"
        has_prompts = any(map(_is_prompt, entries))
        if reason := self._prompts_reason(entries) if has_prompts else self._drafts_reason(entries):
            return reason
        return self.failure if self.failure and self._shape(entries) not in self._captured else ""

    def run(self, entries: Sequence[ScheduledSequence], before: DrawnTokens | None = None) -> StepResult:
        """Computes entries that have no `unsupported_reason`.

        Args:
            before: tokens of the step before, for entries that take theirs from it.
        """
        shape, entries = self._shape(entries), sorted(entries, key=lambda entry: not entry.samples)
        compute = self.capture(shape)
        self.buffers.fill(entries, shape)
        if before is not None:
            before.put_into(self.buffers.token_ids, _first_rows(entries, shape), entries)
        compute()
        sampling = [entry for entry in entries if entry.samples]
        rows = _rows(sampling, shape, self.buffers.logits.device)
        drawn = None
        if self._adjustments is not None and not any(e.sequence.request.sampling.needs_tokens for e in sampling):
            # The device computes logits meanwhile: masks are made now, not before.
            draws = [build_sampling_metadata(entry, unread_token(before, entry)) for entry in sampling]
            self._draw_tokens(self._adjustments, sampling, draws, shape)
            drawn = Drawn(self.buffers.tokens[rows], draws)
        failure = "" if shape in self._captured else self.failure
        return StepResult(sampling, self.buffers.logits[rows], drawn, failure)

    def _draw_tokens(
        self,
        adjustments: AdjustmentBuffers,
        entries: Sequence[ScheduledSequence],
        draws: list[list[SamplingMetadata]],
        shape: Shape,
    ) -> None:
        if not entries:
            return
        truncates = any(group[0].sampling.is_truncated for group in draws)
        adjusts = any(draw.changes_logits for group in draws for draw in group)
        if adjusts:
            adjustments.fill(entries, draws, 1 + shape.num_drafts)
        self.capture(Draws(shape.num_logits, truncates, adjusts))()

    @property
    def kinds(self) -> list[Kind]:
        """Everything that may be captured, the largest first: its memory serves the others."""
        trees = (False, True) if self.buffers.has_trees else (False,)
        shapes = [
            StepShape(size, number, has_trees and number > 0)
            for size, number, has_trees in product(self.sizes, self.draft_sizes, trees)
            if size * (1 + number) <= self.buffers.num_logits
        ]
        found: set[Shape] = {*shapes, *map(self._prompt_shape, self.prompt_sizes)}
        rows = {shape.num_logits for shape in found} if self._draw is not None else set[int]()
        draws = [Draws(number, *ways) for number, *ways in product(rows, (False, True), (False, True))]
        return [
            *sorted(found, key=lambda shape: shape.num_rows, reverse=True),
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
        if not isinstance(kind, Draws):
            self.buffers.fill((), kind)
            return partial(self._compute_logits, self.buffers.batch(kind))
        if self._draw is None or self._adjustments is None:
            raise ValueError(f"{kind}: tokens are drawn by who reads the logits")
        return partial(
            self._draw_rows, self._draw, self._adjustments, kind, self.buffers.sampling_tensors(kind.num_rows)
        )

    def _prompts_reason(self, entries: Sequence[ScheduledSequence]) -> str:
        """Why no captured step computes entries with prompts, in few words; empty when one can."""
        if sum(entry.num_tokens for entry in entries) > self.buffers.num_prompt_rows:
            return "prompts are computed"
        return "drafts and prompts are computed" if any(entry.num_draft_tokens for entry in entries) else ""

    def _drafts_reason(self, entries: Sequence[ScheduledSequence]) -> str:
        """Why no captured step computes entries with drafts, in few words; empty when one can."""
        drafted = [entry for entry in entries if entry.num_tokens > 1]
        if any(entry.num_draft_tokens > self.draft_sizes[-1] for entry in drafted) or not self._fits(entries):
            return "too many drafts"
        # Slots of states are few, or writing them takes longer than computing accepted drafts again.
        keeps_all = all(not entry.state_writes or len(entry.state_writes) == entry.num_tokens for entry in drafted)
        return "" if keeps_all else "states of drafts are left out"

    def _fits(self, entries: Sequence[ScheduledSequence]) -> bool:
        """Whether entries with drafts, padded to the longest one, are few rows or less than half padding."""
        if all(entry.num_tokens == 1 for entry in entries):
            return True
        most = max(FEW_ROWS, 2 * sum(entry.num_tokens for entry in entries))
        return self._shape(entries).num_rows <= min(most, self.buffers.num_logits)

    def _prompt_shape(self, num_rows: int) -> PromptShape:
        return PromptShape(num_rows, min(num_rows, self.buffers.num_sequences))

    def _shape(self, entries: Sequence[ScheduledSequence]) -> Shape:
        if any(map(_is_prompt, entries)):
            num_tokens = sum(entry.num_tokens for entry in entries)
            return self._prompt_shape(self.prompt_sizes[bisect_left(self.prompt_sizes, num_tokens)])
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
        logits = self._compute(batch)
        self.buffers.logits[: len(logits)].copy_(logits)


def _is_prompt(entry: ScheduledSequence) -> bool:
    """Whether an entry has other tokens than the last known one and drafts."""
    return not entry.samples or (entry.num_tokens > 1 and entry.num_tokens - entry.num_draft_tokens > 1)


def _first_rows(entries: Sequence[ScheduledSequence], shape: Shape) -> Sequence[int]:
    """First row of each entry."""
    if isinstance(shape, PromptShape):
        return list(accumulate((entry.num_tokens for entry in entries[:-1]), initial=0))
    return range(0, shape.num_rows, 1 + shape.num_drafts)[: len(entries)]


def _rows(entries: Sequence[ScheduledSequence], shape: Shape, device: torch.device) -> slice | Tensor:
    """Rows of the logits of entries that sample among those of padding."""
    each = 1 + shape.num_drafts
    if isinstance(shape, PromptShape) or all(entry.num_tokens == each for entry in entries):
        return slice(0, each * len(entries))
    return upload((i * each + row for i, entry in enumerate(entries) for row in range(entry.num_tokens)), device)


def draft_sizes(limit: int) -> tuple[int, ...]:
    """Numbers of draft tokens of captured steps, up to `limit`: 0, powers of two, and the limit itself."""
    return (0, *(2**power for power in range(limit.bit_length()) if 2**power < limit), *([limit] if limit else []))


def prompt_sizes(limit: int) -> tuple[int, ...]:
    """Numbers of tokens of captured steps with prompts, up to `limit`; none if that is 0."""
    return tuple(size for size in batch_sizes(limit) if size >= min(LEAST_PROMPT_ROWS, limit)) if limit else ()


def batch_sizes(limit: int) -> tuple[int, ...]:
    """Sizes of captured steps of up to `limit` sequences: close enough that less than half of the rows are padding."""
    sizes = list(SMALL_SIZES)
    while sizes[-1] < limit:
        # 48, 64, 96, 128, 192, 256, ...
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 else sizes[-1] * 4 // 3)
    return (*(size for size in sizes if size < limit), limit)
