"""The first tokens of every sequence in full precision, in addition to quantized pages.

What a token's keys and values are depends on the tokens up to it and on nothing else. So those of the first tokens are
kept under these tokens themselves, in a few slots, and computed by a pass of their own where they are not known. That
makes them independent of who owns which block: prefix cache, copies, preemption, host memory and drafts need not know
of them, and sequences that begin alike share them. It costs a pass over a handful of tokens per new beginning.
"""

from __future__ import annotations

from collections import OrderedDict, abc, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from runtime.backends.model import Model
from runtime.backends.scores import DenseAttention
from runtime.core.memory_plan import SPARE_RESIDUAL_TOKENS
from runtime.core.model_config import DecoderConfig
from runtime.core.request import Sequence, Status
from runtime.core.step import ScheduledSequence

Prefix = tuple[int, ...]


def _zeros(
    config: DecoderConfig, places: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values `[*places, kv_heads, D]` of every layer; empty where a layer reads those of another."""

    def part(dims: Iterable[tuple[int, int]]) -> list[Tensor]:
        shapes = zip(config.kv_sources, dims, strict=True)
        own = [(*places, *shape) if source == layer else (0,) for layer, (source, shape) in enumerate(shapes)]
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in own]

    shapes = config.kv_shapes
    return part((heads, key) for heads, key, _ in shapes), part((heads, value) for heads, _, value in shapes)


class SinkStore:
    """Keys and values of beginnings, the least recently used ones replaced.

    Args:
        count: first tokens that are kept.
        num_slots: beginnings that are kept; at least as many as there are sequences in a step.
        rotate: into the basis in which keys are compared with queries.
        windows: sliding window of every layer; None is none.

    Attributes:
        keys, values: of every layer `[slots, count, kv_heads, D]`; zeros after the end of a shorter
            sequence.
    """

    def __init__(
        self,
        config: DecoderConfig,
        count: int,
        num_slots: int,
        rotate: Callable[[Tensor], Tensor],
        windows: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys, self.values = _zeros(config, (num_slots, count), dtype, device)
        self.sources = config.kv_sources
        self.count, self.windows, self.rotate = count, windows, rotate
        self._slots: OrderedDict[Prefix, int] = OrderedDict()
        self._free = list(range(num_slots))

    def place(self, decoder: Model, entries: abc.Sequence[ScheduledSequence]) -> list[int]:
        """The slot of each entry's beginning, up to the last token of its span; computes those that are missing."""
        prefixes = [_prefix(entry, self.count) for entry in entries]
        wanted = dict.fromkeys(prefixes)
        for prefix in wanted.keys() & self._slots.keys():
            self._slots.move_to_end(prefix)
        missing = {prefix: self._take_slot() for prefix in wanted if prefix not in self._slots}
        lengths: dict[int, list[Prefix]] = defaultdict(list)
        for prefix in missing:
            lengths[len(prefix)].append(prefix)
        for alike in lengths.values():
            self._compute(decoder, alike, [missing[prefix] for prefix in alike])
        slots = [missing[prefix] if prefix in missing else self._slots[prefix] for prefix in prefixes]
        self._remember(missing)
        return slots

    def _take_slot(self) -> int:
        # Those that this step needs are at the end, and there are slots for all of them.
        return self._free.pop() if self._free else self._slots.popitem(last=False)[1]

    def _remember(self, computed: dict[Prefix, int]) -> None:
        """Keeps what is finite; the rest fails its sequence in this step and is gone after it."""
        for prefix, slot in computed.items():
            sums = [part[slot].sum() for part in (*self.keys, *self.values) if len(part)]
            if torch.isfinite(torch.stack(sums).sum()):
                self._slots[prefix] = slot
            else:
                self._free.append(slot)

    def _compute(self, decoder: Model, prefixes: list[Prefix], slots: list[int]) -> None:
        length, (dtype, device) = len(prefixes[0]), (self.keys[0].dtype, self.keys[0].device)
        for part in filter(len, (*self.keys, *self.values)):
            part[slots] = 0
        dense = DenseAttention(length, self.windows, dtype, device, decoder.scores)

        attention = _Beginnings(self, slots, dense)
        tokens = torch.tensor(prefixes, dtype=torch.int64, device=device).flatten()
        positions = torch.arange(length, device=device).repeat(len(prefixes))
        decoder.forward(tokens, positions, attention, None, decoder.whole_states([length] * len(prefixes)))


class _Beginnings:
    """Attention of beginnings of the same length, which stores their keys and values in slots."""

    def __init__(self, store: SinkStore, slots: list[int], dense: DenseAttention) -> None:
        self.store, self.slots, self.dense, self.choose = store, slots, dense, dense.choose

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store, length = self.store, self.dense.length
        if store.sources[layer] == layer:
            store.keys[layer][self.slots, :length] = store.rotate(key).unflatten(0, (-1, length))
            store.values[layer][self.slots, :length] = value.unflatten(0, (-1, length))
        return self.dense(layer, query, key, value)


def _prefix(entry: ScheduledSequence, count: int) -> Prefix:
    """The first tokens of a sequence, drafts included, that the entry's last token sees."""
    stop = min(count, entry.start + entry.num_tokens)
    known = entry.sequence.token_ids[:stop]
    return (*known, *entry.sequence.draft_token_ids[: stop - len(known)])


class ResidualWindow:
    """Rings of keys and values.

    Args:
        window: last tokens that a token sees exactly, itself included.
        num_rings: at least as many as sequences run at the same time.

    Attributes:
        keys, values: of every layer `[rings, length, kv_heads, D]`.
    """

    def __init__(
        self, config: DecoderConfig, window: int, num_rings: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window, self.length = window, window + SPARE_RESIDUAL_TOKENS
        self.keys, self.values = _zeros(config, (num_rings, self.length), dtype, device)
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
        for part in filter(len, (*self.keys, *self.values)):
            part[self._rings[sequence]] = 0

    def _reclaim(self, wanted: set[Sequence]) -> None:
        """Takes the rings of sequences that ended or were preempted: those start again."""
        over = [s for s in self._rings if s.status is not Status.RUNNING and s not in wanted]
        self._free += [self._rings.pop(sequence) for sequence in over]
