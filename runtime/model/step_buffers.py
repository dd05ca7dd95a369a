"""The tensors of a step that is recorded: they stay where they are, only what is in them changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import AttentionGroup, Batch, num_hidden_keys, slots_of, visible_blocks
from runtime.memory import MemoryPlan
from runtime.model.decoder import Decoder
from runtime.reach import Reach
from runtime.step import ScheduledSequence

PADDING = -1
"""Slot and position of rows that stand for no token: nothing is written for them, and they see no keys."""
NUM_COLUMNS = 4
"""Of one row: token id, position, slot, and position among the keys that the row looks at."""


class StepBuffers:
    """Room for steps of up to `num_rows` sequences with one token each.

    The columns `[4, num_rows]` and the block tables `[num_rows, blocks_each]` lie one behind the other, and once more
    in the memory of the host, pinned beside a GPU: one copy brings a step there.

    Args:
        memory: says how long block tables are, and what tokens look at.

    Attributes:
        logits: `[num_rows, V]`, where recorded steps leave their results.
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
        self._tables = self._host[NUM_COLUMNS * num_rows :].view(num_rows, self.blocks_each).numpy()
        self._filled: list[list[int]] = [[] for _ in range(num_rows)]
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self.logits = torch.zeros(num_rows, decoder.config.vocab_size, dtype=dtype, device=device)

    def batch(self, size: int) -> Batch:
        """The first `size` rows as a step. Its numbers are those of the last `fill`; its lengths never change, so a
        launch that is sized by them suits every step."""
        header = self._there[: NUM_COLUMNS * self.num_rows].view(NUM_COLUMNS, self.num_rows)
        token_ids, positions, slots, key_positions = (column[:size] for column in header)
        blocks = self._there[NUM_COLUMNS * self.num_rows :][: size * self.blocks_each]
        num_keys = self.blocks_each * self.block_size
        group = AttentionGroup(slice(0, size), blocks, key_positions, size, num_keys, ragged=True)
        no_rows = token_ids[:0]
        return Batch((), token_ids, positions, slots, (group,), (), no_rows, (), ())

    def fill(self, entries: Sequence[ScheduledSequence], size: int) -> None:
        """Lays out entries of one token each in the first rows and padding in the rest of `size`, and sends them.

        What was sent before must have been used: the caller has read the results of the step before this one.
        """
        for row, entry in enumerate(entries):
            self._numbers[:, row] = self._columns(entry)
        self._numbers[:, len(entries) : size] = [[0], [PADDING], [PADDING], [PADDING]]
        changed = [row for row, entry in enumerate(entries) if self._fill_table(row, entry)]
        sent = NUM_COLUMNS * self.num_rows + (self.blocks_each * (changed[-1] + 1) if changed else 0)
        self._there[:sent].copy_(self._host[:sent], non_blocking=True)

    def _columns(self, entry: ScheduledSequence) -> tuple[int, int, int, int]:
        (slot,) = slots_of(entry, self.block_size)
        hidden = num_hidden_keys(entry, self.block_size, self.reach)
        return entry.sequence.token_ids[entry.start], entry.start, slot, entry.start - hidden

    def _fill_table(self, row: int, entry: ScheduledSequence) -> bool:
        """Whether the row's block table is another one than in the step before."""
        blocks = visible_blocks(entry, self.block_size, self.reach)
        if blocks == self._filled[row]:
            return False
        self._tables[row, : len(blocks)] = blocks
        self._filled[row] = blocks
        return True
