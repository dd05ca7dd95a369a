"""The cache of keys and values of one runner: pages, and what is kept exactly beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_numerics import rotate_heads
from runtime.memory import MemoryPlan
from runtime.model.decoder import Decoder
from runtime.model.pages import KVPages
from runtime.model.pages_choice import choose_pages
from runtime.model.recent import RecentStore
from runtime.model.sinks import SinkStore
from runtime.step import ScheduledSequence


@dataclass(frozen=True, slots=True)
class ExactPlaces:
    """Where the sequences of a step have their exact keys and values: int64 `[entries]`, or None without any."""

    sinks: Tensor | None
    rings: Tensor | None


class KVCache:
    """Keys and values of all sequences of a runner, in the form that its scheme says.

    Args:
        memory: number and size of blocks, the scheme, and how many sequences have exact tokens.

    Attributes:
        reason: for the choice of pages, and with them of the attention.
    """

    def __init__(self, decoder: Decoder, memory: MemoryPlan) -> None:
        self.scheme: KVCacheScheme = memory.kv_cache
        config, dtype, device = decoder.config, decoder.dtype, decoder.device
        self.pages: KVPages
        self.pages, self.reason = choose_pages(decoder, memory)
        sinks, recent, num_sequences = self.scheme.sinks, self.scheme.recent, memory.exact.num_sequences
        # Where the whole model has a window, what is kept as sinks are tokens that all tokens see.
        windows = config.windows if memory.reach.window is None else (None,) * config.num_layers
        self.sinks = SinkStore(config, sinks, num_sequences, self.turn, windows, dtype, device) if sinks else None
        self.recent = RecentStore(config, recent, num_sequences, dtype, device) if recent else None

    def turn(self, heads: Tensor) -> Tensor:
        """Query or key heads `[..., D]`, after RoPE, in the basis in which keys are stored."""
        return rotate_heads(heads) if self.scheme.rotate else heads

    def place(self, decoder: Decoder, entries: Sequence[ScheduledSequence]) -> ExactPlaces:
        """Makes ready what is exact for a step's entries, in their order. May run the decoder over a few tokens."""
        return ExactPlaces(
            None if self.sinks is None else self._tensor(self.sinks.place(decoder, entries)),
            None if self.recent is None else self._tensor(self.recent.place(entries)),
        )

    def _tensor(self, places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.pages.memory.device)
