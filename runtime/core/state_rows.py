"""Recurrent states of a step as tensors: which slot each sequence begins with, and which slots get its states.

The state of one sequence in all recurrent layers is one slot of a pool. A step says for each sequence from which slot
its state comes and after which of its tokens the state goes to which slot (`ScheduledSequence.state_writes`). So a
sequence may begin with the state that another has left, several states of one span may be kept, and nothing is copied:
the slot of a draft token that is not accepted is given back.
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
    """S sequences of a step, and its W segments: their rows are cut behind each token whose state is kept.

    Segments cover the token axis in order. A sequence has one segment or more, and ends with its last one. No slot is
    written twice, and none is written for one sequence and read for another.

    Attributes:
        read_slots: int64 `[S]`, state before the first row of each sequence; slot `num_slots` holds zeros.
        write_slots: int64 `[W]`, where the state behind each segment goes.
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
        """Whether every sequence has one row, so that rows, segments and sequences are the same."""
        return len(self.counts) == sum(self.lengths)

    @property
    def num_rows(self) -> list[int]:
        """Rows of each sequence."""
        lengths = iter(self.lengths)
        return [sum(islice(lengths, count)) for count in self.counts]

    def chunks(self, size: int) -> Tensor:
        """Cuts segments into chunks of `size` rows or fewer: int32 `[chunks, 4]` of the sequence, the first row, the
        row behind the last one, and the segment that ends with it or -1. Made once for all layers of a step."""
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
    """Lays out the states of entries, in the order of their rows."""
    reads = [num_slots if entry.state_read == NO_STATE else entry.state_read for entry in entries]
    writes = [slot for entry in entries for _, slot in entry.state_writes]
    return _lay_out(reads, writes, [_lengths(entry) for entry in entries], device)


def whole_state_rows(lengths: Sequence[int], device: torch.device) -> StateRows:
    """Lays out sequences of these lengths that begin in this step, with as many slots as there are sequences."""
    count = len(lengths)
    return _lay_out([count] * count, list(range(count)), [[length] for length in lengths], device)


def decode_state_rows(read_slots: Tensor, write_slots: Tensor) -> StateRows:
    """Lays out equally many rows of each of S sequences, all of whose states are kept: int64 `[S]` and `[S * n]`."""
    count, rows = len(read_slots), len(write_slots)
    segments = torch.arange(rows + 1, dtype=torch.int32, device=read_slots.device)
    starts = segments[:: rows // count].contiguous()
    return StateRows(read_slots, write_slots, starts, segments, starts, (1,) * rows, (rows // count,) * count)


def _lay_out(reads: list[int], writes: list[int], lengths: list[list[int]], device: torch.device) -> StateRows:
    """Lays out sequences, given the rows of each of their segments."""
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
