"""Tensors that captured steps read and write: only their contents change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar

import torch

from runtime.backends.model import Model
from runtime.core.attention_window import AttentionWindow
from runtime.core.batch import (
    AttentionGroup,
    Batch,
    RaggedRows,
    SamplingTensors,
    equal_rows,
    floats_of,
    integers_of,
    num_hidden_keys,
    positions_of,
    slots_of,
    token_ids_of,
    visible_blocks,
)
from runtime.core.draft_tree import ancestor_bits
from runtime.core.memory_plan import MemoryPlan
from runtime.core.state_rows import decode_state_rows
from runtime.core.step import NO_STATE, ScheduledSequence
from runtime.runner.pending_step import DeviceEvent

PADDING = -1
"""Slot and position of rows that stand for no token: nothing is written for them, and they see no keys."""
NUM_INTEGERS, NUM_FLOATS, NUM_PLACES = 9, 3, 4
"""Columns of a row: token id, position, slot, position among the keys that it looks at, slot that its recurrent state
is written to, and ancestors in a tree of drafts; then how the next token is drawn, as `runtime.core.batch` has it in
`SamplingTensors`: three integers, and three numbers of float64. The first `NUM_PLACES` are all that a step with prompts
has by token; it has the others by sequence."""
READS, LAST_ROWS, SEQUENCES = NUM_INTEGERS, NUM_INTEGERS + 1, NUM_INTEGERS + 2
"""Columns in between: slots that the recurrent states of sequences are read from; of a step with prompts the last row
of each sequence, and the sequence of each row."""
NUM_COLUMNS = NUM_INTEGERS + 3 + NUM_FLOATS


@dataclass(frozen=True, slots=True)
class StepShape:
    """Numbers of sequences in a step, and of draft tokens of each; whether some of these are trees."""

    size: int
    num_drafts: int = 0
    has_trees: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens of the step."""
        return self.size * (1 + self.num_drafts)

    @property
    def num_logits(self) -> int:
        """Rows whose logits are computed."""
        return self.num_rows


@dataclass(frozen=True, slots=True, order=True)
class PromptShape:
    """Number of tokens in a step with prompts, and of sequences, each with any number of them."""

    num_rows: int
    size: int
    num_drafts: ClassVar[int] = 0

    @property
    def num_logits(self) -> int:
        """Rows whose logits are computed: the last ones of sequences."""
        return self.size


Shape = StepShape | PromptShape


class StepBuffers:
    """Room for steps of up to `num_sequences` sequences: with a token each and their drafts, `num_logits` tokens in
    all, or with prompts, `num_prompt_rows` tokens in all.

    Rows of a sequence follow each other, those of its drafts after the one of its last known token. A sequence with
    fewer drafts than others has rows of padding after them; a step with prompts has all padding at its end, and first
    the sequences that sample.

    The columns `[15, num_rows]`, first rows of sequences `[num_sequences + 2]` and block tables
    `[num_sequences, blocks_each]` lie one after the other, and once more in the memory of the host, pinned where the
    device is a GPU: one copy brings a step there.

    Args:
        memory: says how many sequences and drafts there are, how long block tables are, and what tokens look at.

    Attributes:
        logits, tokens: `[num_logits, V]` and int64 `[num_logits]`, where captured steps leave their results.
    """

    def __init__(self, decoder: Model, memory: MemoryPlan) -> None:
        device = decoder.device
        self.num_sequences, self.num_drafts = memory.num_sequences, memory.num_draft_tokens
        self.num_logits, self.has_trees = memory.captured_rows, memory.drafts_trees
        self.num_prompt_rows = memory.prompt_rows
        self.num_rows = max(self.num_logits, self.num_prompt_rows)
        self.block_size: int = memory.block_size
        self.attention_window: AttentionWindow = memory.reach
        self.blocks_each = memory.blocks_per_sequence if memory.token_bytes else 1
        if self.attention_window.window is not None:
            self.blocks_each += -(-self.num_drafts // self.block_size)  # each of them may look as far back as the first
        self.num_state_slots = memory.states.num_slots
        num_columns = NUM_COLUMNS * self.num_rows
        self._num_numbers = num_columns + self.num_sequences + 2  # padding is a sequence as well
        size = self._num_numbers + self.num_sequences * self.blocks_each
        self._sent = DeviceEvent(device)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = torch.zeros(size, dtype=torch.int64, device=device)
        self._numbers = self._host[:num_columns].view(NUM_COLUMNS, self.num_rows).numpy()
        self._starts = self._host[num_columns : self._num_numbers].numpy()
        self._floats = self._numbers[-NUM_FLOATS:].view("float64")
        self._tables = self._host[self._num_numbers :].view(self.num_sequences, self.blocks_each).numpy()
        # Rows of padding begin with a state of zeros, and share a slot to write to (`StateMemory`).
        self._padding = (0, PADDING, PADDING, PADDING, self.num_state_slots + 1, 0, 0, 0, 0)
        self._filled: list[list[int]] = [[] for _ in range(self.num_sequences)]
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self.logits = torch.zeros(self.num_logits, decoder.config.spec.vocab_size, dtype=dtype, device=device)
        self.tokens = torch.zeros(self.num_logits, dtype=torch.int64, device=device)
        # Kernels of a GPU attend by sequence; others attend group by group, and there each token is one.
        num_group_rows = 0 if device.type == "cuda" else self.num_prompt_rows
        self._row_blocks = torch.zeros(num_group_rows, self.blocks_each, dtype=torch.int64, device=device)

    def batch(self, shape: Shape) -> Batch:
        """The first rows as a step. Its numbers are those of the last `fill`; its lengths never change, so a launch
        that is sized by them suits every step."""
        rows = shape.num_rows
        token_ids, positions, slots, key_positions, writes, ancestors, *_ = self._columns(rows)
        num_keys = self.blocks_each * self.block_size
        if isinstance(shape, PromptShape):
            blocks, last_rows = self._row_blocks[:rows].view(-1), self._columns(shape.size)[LAST_ROWS]
            group = AttentionGroup(slice(0, rows), blocks, key_positions, rows, num_keys, ragged=True)
            ragged, groups = self._rows_by_sequence(shape, key_positions), (group,) * (len(blocks) > 0)
            return Batch((), token_ids, positions, slots, groups, (), last_rows, (), (), ragged=ragged)
        blocks = self._blocks(shape.size)
        bits = ancestors if shape.has_trees else None
        group = AttentionGroup(slice(0, rows), blocks, key_positions, shape.size, num_keys, ragged=True, ancestors=bits)
        reads = self._columns(shape.size)[READS]
        state_rows = decode_state_rows(reads, writes) if self.num_state_slots else None
        return Batch(
            (), token_ids, positions, slots, (group,), (), token_ids[:0], (), (), state_rows, equal_rows(group)
        )

    def _rows_by_sequence(self, shape: PromptShape, key_positions: torch.Tensor) -> RaggedRows:
        """Rows of a step with prompts; those of padding are a sequence without keys after the others."""
        starts = self._there[NUM_COLUMNS * self.num_rows :][: shape.size + 2]
        tables = torch.arange(shape.size + 1, device=starts.device).clamp(max=shape.size - 1) * self.blocks_each
        num_keys = self.blocks_each * self.block_size
        return RaggedRows(starts, tables, self._blocks(shape.size), key_positions, None, shape.num_rows, num_keys)

    def _blocks(self, num_sequences: int) -> torch.Tensor:
        return self._there[self._num_numbers :][: num_sequences * self.blocks_each]

    def sampling_tensors(self, num_rows: int) -> SamplingTensors:
        """Sampling tensors of the first rows, as `batch`. Rows of padding are greedy."""
        columns = self._columns(num_rows)
        floats = (column.view(torch.float64) for column in columns[-NUM_FLOATS:])
        return SamplingTensors(*columns[NUM_INTEGERS - 3 : NUM_INTEGERS], *floats)

    def fill(self, entries: Sequence[ScheduledSequence], shape: Shape) -> None:
        """Lays out entries in the first rows and padding in the rest, and sends them.

        A token that only the step before knows is left out: it is written to `token_ids`.
        """
        self._sent.wait()
        if isinstance(shape, PromptShape):
            self._fill_spans(entries, shape)
        else:
            self._fill_tokens(entries, shape)
        changed = [row for row, entry in enumerate(entries) if self._fill_table(row, entry)]
        sent = self._num_numbers + (self.blocks_each * (changed[-1] + 1) if changed else 0)
        self._there[:sent].copy_(self._host[:sent], non_blocking=True)
        self._sent.record()
        if isinstance(shape, PromptShape) and len(self._row_blocks):
            tables = self._blocks(self.num_sequences).view(self.num_sequences, self.blocks_each)
            sequences = self._columns(shape.num_rows)[SEQUENCES]
            torch.index_select(tables, 0, sequences, out=self._row_blocks[: shape.num_rows])

    def _fill_tokens(self, entries: Sequence[ScheduledSequence], shape: StepShape) -> None:
        """Fills the columns of tokens and their drafts."""
        count, rows = len(entries) * (1 + shape.num_drafts), shape.num_rows
        if entries:
            if shape.num_drafts:
                integers = list(chain.from_iterable(self._padded(entry, shape.num_drafts) for entry in entries))
                floats = list(chain.from_iterable(_padded_floats(entry, shape.num_drafts) for entry in entries))
            else:
                integers = [self._decode_integers(entry) for entry in entries]
                floats = [floats_of(entry.sequence.request.sampling) for entry in entries]
            self._numbers[:NUM_INTEGERS, :count] = list(zip(*integers, strict=True))
            self._floats[:, :count] = list(zip(*floats, strict=True))
            self._numbers[READS, : len(entries)] = [self._read_slot(entry) for entry in entries]
        self._numbers[:NUM_INTEGERS, count:rows] = [[number] for number in self._padding]
        self._numbers[READS, len(entries) : shape.size] = self.num_state_slots
        self._floats[:, count:rows] = 0

    def _fill_spans(self, entries: Sequence[ScheduledSequence], shape: PromptShape) -> None:
        """Fills the columns of spans of any length."""
        ends = list(accumulate(entry.num_tokens for entry in entries))
        count = ends[-1] if ends else 0
        self._starts[: len(entries) + 1] = [0, *ends]
        self._starts[len(entries) + 1 : shape.size + 2] = shape.num_rows
        for column, of in enumerate((token_ids_of, positions_of, self._slots_of, self._key_positions)):
            self._numbers[column, :count] = list(chain.from_iterable(map(of, entries)))
        self._numbers[:NUM_PLACES, count : shape.num_rows] = [[number] for number in self._padding[:NUM_PLACES]]
        self._numbers[SEQUENCES, : shape.num_rows] = 0
        self._numbers[LAST_ROWS, : shape.size] = 0
        self._floats[:, : shape.size] = 0
        for row, (entry, end) in enumerate(zip(entries, ends, strict=True)):
            request = entry.sequence.request
            self._numbers[SEQUENCES, end - entry.num_tokens : end] = row
            self._numbers[LAST_ROWS, row] = end - 1
            sampling = integers_of(request.sampling, request.seed, entry.start + entry.num_tokens)
            self._numbers[NUM_INTEGERS - len(sampling) : NUM_INTEGERS, row] = sampling
            self._floats[:, row] = floats_of(request.sampling)

    def _slots_of(self, entry: ScheduledSequence) -> list[int]:
        return slots_of(entry, self.block_size)

    def _key_positions(self, entry: ScheduledSequence) -> range:
        hidden = num_hidden_keys(entry, self.block_size, self.attention_window)
        return range(entry.start - hidden, entry.start + entry.num_tokens - hidden)

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 `[num_rows]`, the token ids of what was sent."""
        return self._columns(self.num_rows)[0]

    def _columns(self, num_rows: int) -> list[torch.Tensor]:
        columns = self._there[: NUM_COLUMNS * self.num_rows].view(NUM_COLUMNS, self.num_rows)
        return [column[:num_rows] for column in columns]

    def _decode_integers(self, entry: ScheduledSequence) -> tuple[int, ...]:
        request, start = entry.sequence.request, entry.start
        (token_id,), (slot,) = token_ids_of(entry), slots_of(entry, self.block_size)
        hidden = num_hidden_keys(entry, self.block_size, self.attention_window)
        write = entry.state_writes[0][1] if entry.state_writes else 0
        sampling = integers_of(request.sampling, request.seed, start + 1)
        return token_id, start, slot, start - hidden, write, 1, *sampling

    def _padded(self, entry: ScheduledSequence, num_drafts: int) -> Iterator[tuple[int, ...]]:
        """Yields the integers of each token of a span, then those of padding."""
        request = entry.sequence.request
        hidden = num_hidden_keys(entry, self.block_size, self.attention_window)
        tokens = zip(
            token_ids_of(entry),
            positions_of(entry),
            slots_of(entry, self.block_size),
            [slot for _, slot in entry.state_writes] or [0] * entry.num_tokens,
            ancestor_bits(entry.draft_parents),
            strict=True,
        )
        for token_id, position, slot, write, bits in tokens:
            sampling = integers_of(request.sampling, request.seed, position + 1)
            yield token_id, position, slot, position - hidden, write, bits, *sampling
        yield from [self._padding] * (1 + num_drafts - entry.num_tokens)

    def _read_slot(self, entry: ScheduledSequence) -> int:
        return self.num_state_slots if entry.state_read == NO_STATE else entry.state_read

    def _fill_table(self, row: int, entry: ScheduledSequence) -> bool:
        """Whether the row's block table is another one than in the step before."""
        blocks = visible_blocks(entry, self.block_size, self.attention_window)
        if blocks == self._filled[row]:
            return False
        self._tables[row, : len(blocks)] = blocks
        self._filled[row] = blocks
        return True


def _padded_floats(entry: ScheduledSequence, num_drafts: int) -> list[tuple[float, ...]]:
    padding = [(0.0,) * NUM_FLOATS] * (1 + num_drafts - entry.num_tokens)
    return [floats_of(entry.sequence.request.sampling)] * entry.num_tokens + padding
