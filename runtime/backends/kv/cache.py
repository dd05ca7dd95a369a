"""The cache of keys and values of one runner: pages, and what is kept exactly beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import rotate_heads
from runtime.backends.cpu.kv_pages import NativePages, refuse_pages
from runtime.backends.kv.exact_tokens import RecentStore, SinkStore
from runtime.backends.kv.pages import ExactPages, KVPages, QuantizedPages
from runtime.backends.torch.ops import TorchOps
from runtime.core.step import ScheduledSequence
from runtime.memory.plan import MemoryPlan
from runtime.model.decoder import Decoder


def choose_pages(decoder: Decoder, memory: MemoryPlan) -> tuple[KVPages, str]:
    """Pages of compiled attention where it can serve this runner, else those of plain torch."""
    config, scheme = decoder.config, memory.kv_cache
    refusal = refuse_native(decoder, memory)
    sizes = (memory.num_blocks, memory.block_size, decoder.dtype, decoder.device, memory.num_host_blocks)
    if not refusal:
        return NativePages(config, scheme, *sizes), "compiled, reads pages as they are"
    reason = f"plain torch; compiled attention {refusal}"
    if scheme.is_exact:
        return ExactPages(config, *sizes), reason
    return QuantizedPages(config, scheme, *sizes), reason


def refuse_native(decoder: Decoder, memory: MemoryPlan) -> str:
    """Why compiled attention cannot serve a runner; empty when it can."""
    if memory.attention_window.window is not None and memory.attention_window.sinks:
        return "keeps no sinks of streams"
    refusal = refuse_pages(decoder.config, memory.kv_cache, memory.block_size, decoder.dtype, decoder.device)
    if not refusal and isinstance(decoder.ops, TorchOps):
        return "goes with compiled ops between linears"
    return refusal


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
        windows = config.windows if memory.attention_window.window is None else (None,) * config.num_layers
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
