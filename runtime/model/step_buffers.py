"""The tensors of a step that is recorded: they stay where they are, only what is in them changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import AttentionGroup, Batch, num_hidden_keys, slots_of, visible_blocks
from runtime.memory import MemoryPlan
from runtime.model.decoder import Decoder
from runtime.reach import Reach
from runtime.sampler.wishes import Wishes, floats_of, integers_of
from runtime.step import ScheduledSequence

PADDING = -1
"""Slot and position of rows that stand for no token: nothing is written for them, and they see no keys."""
PADDING_NUMBERS = [[0], [PADDING], [PADDING], [PADDING]]
NUM_NUMBERS, NUM_WISHES = 4, 6
"""Columns of a row: token id, position, slot, and position among the keys that it looks at; then how the next token is
drawn, as `runtime.sampler.wishes` has it: three integers, and three numbers of float64."""
NUM_COLUMNS = NUM_NUMBERS + NUM_WISHES


class StepBuffers:
    """Room for steps of up to `num_rows` sequences with one token each.

    The columns `[10, num_rows]` and the block tables `[num_rows, blocks_each]` lie one behind the other, and once more
    in the memory of the host, pinned beside a GPU: one copy brings a step there.

    Args:
        memory: says how long block tables are, and what tokens look at.

    Attributes:
        logits, tokens: `[num_rows, V]` and int64 `[num_rows]`, where recorded steps leave their results.
    """

    def __init__(self, decoder: Decoder, memory: MemoryPlan, num_rows: int) -> None:
        device = decoder.device
        self.num_rows, self.blocks_each = num_rows, memory.blocks_per_sequence
        self.block_size: int = memory.block_size
        self.reach: Reach = memory.reach
        size = num_rows * (NUM_COLUMNS + self.blocks_each)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = torch.zeros(size, dtype=torch.int64, device=device)
        self._numbers = self._host[: NUM_COLUMNS * num_rows].view(NUM_COLUMNS, num_rows).numpy()
        self._floats = self._numbers[-3:].view("float64")
        self._tables = self._host[NUM_COLUMNS * num_rows :].view(num_rows, self.blocks_each).numpy()
        self._filled: list[list[int]] = [[] for _ in range(num_rows)]
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self.logits = torch.zeros(num_rows, decoder.config.vocab_size, dtype=dtype, device=device)
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def batch(self, size: int) -> Batch:
        """The first `size` rows as a step. Its numbers are those of the last `fill`; its lengths never change, so a
        launch that is sized by them suits every step."""
        token_ids, positions, slots, key_positions = self._columns(size)[:NUM_NUMBERS]
        blocks = self._there[NUM_COLUMNS * self.num_rows :][: size * self.blocks_each]
        num_keys = self.blocks_each * self.block_size
        group = AttentionGroup(slice(0, size), blocks, key_positions, size, num_keys, ragged=True)
        no_rows = token_ids[:0]
        return Batch((), token_ids, positions, slots, (group,), (), no_rows, (), ())

    def wishes(self, size: int) -> Wishes:
        """Of the first `size` rows, as `batch`. Rows of padding are greedy."""
        columns = self._columns(size)[NUM_NUMBERS:]
        return Wishes.of_columns(columns[:3], [column.view(torch.float64) for column in columns[3:]])

    def fill(self, entries: Sequence[ScheduledSequence], size: int) -> None:
        """Lays out entries of one token each in the first rows and padding in the rest of `size`, and sends them.

        What was sent before must have been used: the caller has read the results of the step before this one.
        """
        count = len(entries)
        floats = [floats_of(entry.sequence.request.sampling) for entry in entries]
        self._numbers[:-3, :count] = list(zip(*map(self._integers, entries), strict=True))
        self._floats[:, :count] = list(zip(*floats, strict=True))
        self._numbers[:NUM_NUMBERS, count:size] = PADDING_NUMBERS
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
        hidden = num_hidden_keys(entry, self.block_size, self.reach)
        wishes = integers_of(request.sampling, request.seed, start + 1)
        return entry.sequence.token_ids[start], start, slot, start - hidden, *wishes

    def _fill_table(self, row: int, entry: ScheduledSequence) -> bool:
        """Whether the row's block table is another one than in the step before."""
        blocks = visible_blocks(entry, self.block_size, self.reach)
        if blocks == self._filled[row]:
            return False
        self._tables[row, : len(blocks)] = blocks
        self._filled[row] = blocks
        return True
