"""Tensors of a step's recurrent states: slots to read and slots to write per sequence.

The state of one sequence in all recurrent layers is one slot of a pool. A step defines for each sequence the slot of
its initial state, and after which tokens the state is written to which slot (`ScheduledSequence.state_writes`). A
sequence may start from a state that another one has saved, and several states of one span may be stored, without
copies: the slot of a rejected draft token is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, pairwise

import torch
from torch import Tensor

from runtime.core.step import NO_STATE, ScheduledSequence


@dataclass(frozen=True, slots=True)
class StateRows:
    """S sequences of a step and their W segments; a segment ends after each token whose state is stored.

    Segments cover the token axis in order. A sequence consists of one or more segments. No slot is
    written twice, and none is written for one sequence and read for another.

    Attributes:
        read_slots: int64 `[S]`, state before the first row of each sequence; slot `num_slots` holds zeros.
        write_slots: int64 `[W]`, slot for the state after each segment.
        row_starts: int32 `[S + 1]`, first row of each sequence, and the number of rows.
        segment_starts: int32 `[W + 1]`, first row of each segment, and the number of rows.
        first_segments: int32 `[S + 1]`, first segment of each sequence, and the number of segments.
        lengths: rows of each segment.
        counts: segments of each sequence.
    """

    read_slots: Tensor
    write_slots: Tensor
    row_starts: Tensor
    segment_starts: Tensor
    first_segments: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    _chunks: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_single(self) -> bool:
        """Whether every sequence has one row; then rows, segments and sequences coincide."""
        return len(self.counts) == sum(self.lengths)

    @property
    def num_rows(self) -> list[int]:
        """Rows of each sequence."""
        lengths = iter(self.lengths)
        return [sum(islice(lengths, count)) for count in self.counts]

    def chunks(self, size: int) -> Tensor:
        """Cuts segments into chunks of `size` rows or fewer: int32 `[chunks, 4]` of the sequence, the first row, the
        row after the last one, and the segment that ends with it or -1. Made once for all layers of a step."""
        if size not in self._chunks:
            self._chunks[size] = torch.tensor(self._cut(size), dtype=torch.int32).to(self.read_slots.device)
        return self._chunks[size]

    def _cut(self, size: int) -> list[tuple[int, int, int, int]]:
        cuts, sequences = [], chain.from_iterable([index] * count for index, count in enumerate(self.counts))
        bounds = pairwise(accumulate(self.lengths, initial=0))
        for segment, (sequence, (start, stop)) in enumerate(zip(sequences, bounds, strict=True)):
            for first in range(start, stop, size):
                end = min(first + size, stop)
                cuts.append((sequence, first, end, segment if end == stop else -1))
        return cuts


def build_state_rows(entries: Sequence[ScheduledSequence], num_slots: int, device: torch.device) -> StateRows:
    """Builds the state rows of entries, in the order of their rows."""
    reads = [num_slots if entry.state_read == NO_STATE else entry.state_read for entry in entries]
    writes = [slot for entry in entries for _, slot in entry.state_writes]
    return _lay_out(reads, writes, [_lengths(entry) for entry in entries], device)


def whole_state_rows(lengths: Sequence[int], device: torch.device) -> StateRows:
    """Builds the state rows of sequences that start in this step, one slot per sequence."""
    count = len(lengths)
    return _lay_out([count] * count, list(range(count)), [[length] for length in lengths], device)


def decode_state_rows(read_slots: Tensor, write_slots: Tensor) -> StateRows:
    """Builds the state rows of S sequences with n rows each, all states stored: int64 `[S]` and `[S * n]`."""
    count, rows = len(read_slots), len(write_slots)
    segments = torch.arange(rows + 1, dtype=torch.int32, device=read_slots.device)
    starts = segments[:: rows // count].contiguous()
    return StateRows(read_slots, write_slots, starts, segments, starts, (1,) * rows, (rows // count,) * count)


def _lay_out(reads: list[int], writes: list[int], lengths: list[list[int]], device: torch.device) -> StateRows:
    """Builds state rows from the segment lengths of sequences."""
    flat, counts = tuple(chain.from_iterable(lengths)), tuple(map(len, lengths))
    starts = [list(accumulate(each, initial=0)) for each in (map(sum, lengths), flat, counts)]
    slots = torch.tensor(reads + writes, device=device)
    bounds = torch.tensor(list(chain.from_iterable(starts)), dtype=torch.int32, device=device)
    read_slots, write_slots = slots.split([len(reads), len(writes)])
    row_starts, segment_starts, first_segments = bounds.split(list(map(len, starts)))
    return StateRows(read_slots, write_slots, row_starts, segment_starts, first_segments, flat, counts)


def _lengths(entry: ScheduledSequence) -> list[int]:
    """Returns the rows of each segment of an entry."""
    stops = [offset + 1 for offset, _ in entry.state_writes]
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
