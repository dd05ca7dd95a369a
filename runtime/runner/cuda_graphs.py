"""CUDA graphs of decoding steps, and the tensors that they read and write: only their contents change."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.core.attention_window import AttentionWindow
from runtime.core.batch import (
    AttentionGroup,
    Batch,
    SamplingTensors,
    floats_of,
    integers_of,
    num_hidden_keys,
    slots_of,
    visible_blocks,
)
from runtime.core.memory_plan import MemoryPlan
from runtime.core.state_rows import decode_state_rows
from runtime.core.step import NO_STATE, ScheduledSequence
from runtime.model.served import ServedModel
from runtime.sampling.sampler import SampleStep

PADDING = -1
"""Slot and position of rows that stand for no token: nothing is written for them, and they see no keys."""
NUM_NUMBERS, NUM_SAMPLING_COLUMNS = 6, 6
"""Columns of a row: token id, position, slot, position among the keys that it looks at, and slots that its recurrent
state is read from and written to; then how the next token is drawn, as `runtime.core.batch.SamplingTensors` has it:
three integers, and three numbers of float64."""
NUM_COLUMNS = NUM_NUMBERS + NUM_SAMPLING_COLUMNS


class StepBuffers:
    """Room for steps of up to `num_rows` sequences with one token each.

    The columns `[12, num_rows]` and the block tables `[num_rows, blocks_each]` lie one behind the other, and once more
    in the memory of the host, pinned beside a GPU: one copy brings a step there.

    Args:
        memory: says how long block tables are, and what tokens look at.

    Attributes:
        logits, tokens: `[num_rows, V]` and int64 `[num_rows]`, where captured steps leave their results.
    """

    def __init__(self, decoder: ServedModel, memory: MemoryPlan, num_rows: int) -> None:
        device = decoder.device
        self.num_rows, self.blocks_each = num_rows, memory.blocks_per_sequence if memory.token_bytes else 1
        self.block_size: int = memory.block_size
        self.attention_window: AttentionWindow = memory.reach
        self.num_state_slots = memory.states.num_slots
        size = num_rows * (NUM_COLUMNS + self.blocks_each)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = torch.zeros(size, dtype=torch.int64, device=device)
        self._numbers = self._host[: NUM_COLUMNS * num_rows].view(NUM_COLUMNS, num_rows).numpy()
        self._floats = self._numbers[-3:].view("float64")
        self._tables = self._host[NUM_COLUMNS * num_rows :].view(num_rows, self.blocks_each).numpy()
        # Rows of padding begin with a state of zeros, and share a slot to write to (`StateMemory`).
        states = self.num_state_slots, self.num_state_slots + 1
        self._padding = [[number] for number in (0, PADDING, PADDING, PADDING, *states)]
        self._filled: list[list[int]] = [[] for _ in range(num_rows)]
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self.logits = torch.zeros(num_rows, decoder.config.vocab_size, dtype=dtype, device=device)
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def batch(self, size: int) -> Batch:
        """The first `size` rows as a step. Its numbers are those of the last `fill`; its lengths never change, so a
        launch that is sized by them suits every step."""
        token_ids, positions, slots, key_positions, *state_slots = self._columns(size)[:NUM_NUMBERS]
        blocks = self._there[NUM_COLUMNS * self.num_rows :][: size * self.blocks_each]
        num_keys = self.blocks_each * self.block_size
        group = AttentionGroup(slice(0, size), blocks, key_positions, size, num_keys, ragged=True)
        no_rows = token_ids[:0]
        state_rows = decode_state_rows(*state_slots) if self.num_state_slots else None
        return Batch((), token_ids, positions, slots, (group,), (), no_rows, (), (), state_rows)

    def sampling_tensors(self, size: int) -> SamplingTensors:
        """Sampling tensors of the first `size` rows, as `batch`. Rows of padding are greedy."""
        columns = self._columns(size)[NUM_NUMBERS:]
        return SamplingTensors(*columns[:3], *(column.view(torch.float64) for column in columns[3:]))

    def fill(self, entries: Sequence[ScheduledSequence], size: int) -> None:
        """Lays out entries of one token each in the first rows and padding in the rest of `size`, and sends them.

        What was sent before must have been used: the caller has read the results of the step before this one.
        """
        count = len(entries)
        floats = [floats_of(entry.sequence.request.sampling) for entry in entries]
        if entries:
            self._numbers[:-3, :count] = list(zip(*map(self._integers, entries), strict=True))
            self._floats[:, :count] = list(zip(*floats, strict=True))
        self._numbers[:NUM_NUMBERS, count:size] = self._padding
        self._numbers[NUM_NUMBERS:, count:size] = 0
        changed = [row for row, entry in enumerate(entries) if self._fill_table(row, entry)]
        sent = NUM_COLUMNS * self.num_rows + (self.blocks_each * (changed[-1] + 1) if changed else 0)
        self._there[:sent].copy_(self._host[:sent], non_blocking=True)

    def _columns(self, size: int) -> list[torch.Tensor]:
        columns = self._there[: NUM_COLUMNS * self.num_rows].view(NUM_COLUMNS, self.num_rows)
        return [column[:size] for column in columns]

    def _integers(self, entry: ScheduledSequence) -> tuple[int, ...]:
        request, start = entry.sequence.request, entry.start
        (slot,) = slots_of(entry, self.block_size)
        hidden = num_hidden_keys(entry, self.block_size, self.attention_window)
        sampling = integers_of(request.sampling, request.seed, start + 1)
        return entry.sequence.token_ids[start], start, slot, start - hidden, *self._state_slots(entry), *sampling

    def _state_slots(self, entry: ScheduledSequence) -> tuple[int, int]:
        """Where the recurrent state comes from and goes to; without such states anything."""
        if not entry.state_writes:
            return 0, 0
        ((_, write),) = entry.state_writes
        return self.num_state_slots if entry.state_read == NO_STATE else entry.state_read, write

    def _fill_table(self, row: int, entry: ScheduledSequence) -> bool:
        """Whether the row's block table is another one than in the step before."""
        blocks = visible_blocks(entry, self.block_size, self.attention_window)
        if blocks == self._filled[row]:
            return False
        self._tables[row, : len(blocks)] = blocks
        self._filled[row] = blocks
        return True


Computation = Callable[[], None]
"""Reads and writes tensors that stay where they are."""

NUM_WARM_UPS = 2
"""Runs before the captured one: libraries and compilers make themselves ready in the first, which cannot be captured
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)."""


class Capture(Protocol):
    """Captures computations that run one at a time."""

    def __call__(self, compute: Computation) -> Computation:
        """Returns a function that runs `compute` again. `compute` may run any number of times while capturing."""
        ...


class CudaCapture:
    """Captures CUDA graphs. They share one pool of memory, so together they need as much as the largest one; hence what
    they compute must be written to tensors from outside of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Computation) -> Computation:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU for something else while this one records.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph.replay


logger = logging.getLogger("runtime.graphs")

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)


class _Kind(NamedTuple):
    """Kind of step that one graph serves: rows, and whether some use top-k, top-p or min-p."""

    size: int
    truncates: bool


class StepGraphs:
    """Recorded steps over one set of buffers.

    Args:
        compute: logits `[B, V]` of the B rows of a batch, in any dtype.
        capture: how steps are captured.
        draw: draws tokens from logits within the step; None leaves that to who reads the logits.

    Attributes:
        sizes: numbers of rows that are captured, in order.
        failure: why no other kind of step is captured any more; empty while nothing went wrong.
    """

    def __init__(
        self, compute: Callable[[Batch], Tensor], buffers: StepBuffers, capture: Capture, draw: SampleStep | None
    ) -> None:
        self.buffers = buffers
        self.sizes = batch_sizes(buffers.num_rows)
        self.failure = ""
        self._compute, self._capture, self._draw = compute, capture, draw
        self._captured: dict[_Kind, Computation] = {}

    def unsupported_reason(self, entries: Sequence[ScheduledSequence]) -> str:
        """Why a step of these entries cannot be run here, in few words; empty when it can."""
        if len(entries) > self.buffers.num_rows:
            return "too many sequences"
        if any(entry.num_draft_tokens for entry in entries):
            return "drafts are verified"
        if any(entry.num_tokens > 1 or not entry.samples for entry in entries):
            return "prompts are computed"
        if any(entry.sequence.wants_whole_prompt for entry in entries):
            return "prompts are looked at"
        return "" if self._kind(entries) in self._captured else self.failure

    def run(self, entries: Sequence[ScheduledSequence]) -> tuple[Tensor, Tensor | None]:
        """For n supported entries, in their order: logits `[n, V]`, and what `draw` made of them, int64
        `[n]`; good until the next call."""
        kind, count = self._kind(entries), len(entries)
        step = self._captured.get(kind) or self._capture_step(kind)
        self.buffers.fill(entries, kind.size)
        step()
        return self.buffers.logits[:count], self.buffers.tokens[:count] if self._draw else None

    def _kind(self, entries: Sequence[ScheduledSequence]) -> _Kind:
        size = self.sizes[bisect_left(self.sizes, len(entries))]
        truncates = any(entry.sequence.request.sampling.is_truncated for entry in entries)
        return _Kind(size, truncates and self._draw is not None)

    def _capture_step(self, kind: _Kind) -> Computation:
        """The captured step of a kind; the step itself where capture fails. It is captured with rows of padding: a
        recurrent state must not advance with every run."""
        self.buffers.fill((), kind.size)
        step = partial(self._step, self.buffers.batch(kind.size), kind)
        try:
            captured = self._captured[kind] = self._capture(step)
        except RuntimeError as error:  # an operation that cannot be captured, or no memory for one more graph
            self.failure = "capture failed"
            logger.warning("no step of %d sequences or another new kind is captured any more: %s", kind.size, error)
            return step
        return captured

    def _step(self, batch: Batch, kind: _Kind) -> None:
        logits, tokens = self.buffers.logits[: kind.size], self.buffers.tokens[: kind.size]
        logits.copy_(self._compute(batch))
        if self._draw is not None:
            self._draw(logits, logits, self.buffers.sampling_tensors(kind.size), kind.truncates, tokens)


def batch_sizes(limit: int) -> tuple[int, ...]:
    """Sizes of captured steps of up to `limit` sequences: close enough that less than half of the rows are padding."""
    sizes = list(SMALL_SIZES)
    while sizes[-1] < limit:
        # 48, 64, 96, 128, 192, 256, ...
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 else sizes[-1] * 4 // 3)
    return (*(size for size in sizes if size < limit), limit)
