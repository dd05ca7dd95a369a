"""The last tokens of every running sequence in full precision, beside pages that quantize.

Each sequence has a ring: the keys and values of a position stand at that position modulo the ring's length. They depend
on what was computed in this run of the sequence, so nobody can start from another's blocks while there are rings
(`Runner.shares_blocks`); a preempted sequence computes its tokens again and fills its ring anew.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from runtime.kv_bytes import SPARE_RECENT_TOKENS
from runtime.model.config import DecoderConfig
from runtime.step import ScheduledSequence
from runtime.types import Sequence, Status


class RecentStore:
    """Rings of keys and values.

    Args:
        window: last tokens that a token sees exactly, itself included.
        num_rings: at least as many as sequences run at the same time.

    Attributes:
        keys, values: `[layers, rings, length, kv_heads, D]`.
    """

    def __init__(
        self, config: DecoderConfig, window: int, num_rings: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window, self.length = window, window + SPARE_RECENT_TOKENS
        shape = (config.num_layers, num_rings, self.length, config.num_kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._rings: dict[Sequence, int] = {}
        self._free = list(range(num_rings))

    def place(self, entries: ListOf[ScheduledSequence]) -> list[int]:
        """The ring of each entry's sequence. One that starts gets a ring of zeros.

        Raises:
            RuntimeError: a sequence goes on that never began here, or more of them run than there are rings.
        """
        wanted = {entry.sequence for entry in entries}
        rings = []
        for entry in entries:
            if entry.start == 0:
                self._begin(entry.sequence, wanted)
            if entry.sequence not in self._rings:
                raise RuntimeError(f"sequence {entry.sequence.id} goes on without its recent keys and values")
            rings.append(self._rings[entry.sequence])
        return rings

    def read(self, layer: int, rings: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value `[B, window - 1, kv_heads, D]` of the tokens before positions `starts [B]`."""
        places = self._places(rings, starts.unsqueeze(1) + torch.arange(1 - self.window, 0, device=starts.device))
        return self.keys[layer].flatten(0, 1)[places], self.values[layer].flatten(0, 1)[places]

    def write(self, layer: int, rings: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value `[B, n, kv_heads, D]` of neighbouring positions `[B, n]`: as many last ones as fit."""
        places = self._places(rings, positions[:, -self.length :])
        self.keys[layer].flatten(0, 1)[places] = key[:, -self.length :]
        self.values[layer].flatten(0, 1)[places] = value[:, -self.length :]

    def _places(self, rings: Tensor, positions: Tensor) -> Tensor:
        return rings.unsqueeze(1) * self.length + positions % self.length

    def _begin(self, sequence: Sequence, wanted: set[Sequence]) -> None:
        if sequence not in self._rings:
            if not self._free:
                self._reclaim(wanted)
            if not self._free:
                raise RuntimeError(f"more than {len(self._rings)} sequences with recent keys and values run")
            self._rings[sequence] = self._free.pop()
        # What an earlier owner left, even NaN, is multiplied by zero.
        self.keys[:, self._rings[sequence]] = 0
        self.values[:, self._rings[sequence]] = 0

    def _reclaim(self, wanted: set[Sequence]) -> None:
        """Takes the rings of sequences that ended or were preempted: those start anew."""
        over = [s for s in self._rings if s.status is not Status.RUNNING and s not in wanted]
        self._free += [self._rings.pop(sequence) for sequence in over]
