"""The first tokens of every sequence in full precision, beside pages that quantize.

What a token's keys and values are depends on the tokens up to it and on nothing else. So those of the first tokens are
kept under these tokens themselves, in a few slots, and computed by a pass of their own where they are not known. That
makes them independent of who owns which block: prefix cache, copies, preemption, host memory and drafts need not know
of them, and sequences that begin alike share them. It costs a pass over a handful of tokens per new beginning.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from runtime.attention.dense import DenseAttention
from runtime.model.config import DecoderConfig
from runtime.model.decoder import Decoder
from runtime.step import ScheduledSequence

Prefix = tuple[int, ...]


class SinkStore:
    """Keys and values of beginnings, the least recently used ones replaced.

    Args:
        count: first tokens that are kept.
        num_slots: beginnings that are kept; at least as many as there are sequences in a step.
        turn: into the basis in which keys are compared with queries.
        windows: sliding window of every layer; None is none.

    Attributes:
        keys, values: `[layers, slots, count, kv_heads, D]`; zeros behind the end of a sequence that is still shorter.
    """

    def __init__(
        self,
        config: DecoderConfig,
        count: int,
        num_slots: int,
        turn: Callable[[Tensor], Tensor],
        windows: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, num_slots, count, config.num_kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.count, self.windows, self.turn = count, windows, turn
        self._slots: OrderedDict[Prefix, int] = OrderedDict()
        self._free = list(range(num_slots))

    def place(self, decoder: Decoder, entries: abc.Sequence[ScheduledSequence]) -> list[int]:
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
            if torch.isfinite(self.keys[:, slot].sum() + self.values[:, slot].sum()):
                self._slots[prefix] = slot
            else:
                self._free.append(slot)

    def _compute(self, decoder: Decoder, prefixes: list[Prefix], slots: list[int]) -> None:
        length, device = len(prefixes[0]), self.keys.device
        self.keys[:, slots] = 0
        self.values[:, slots] = 0
        dense = DenseAttention(length, self.windows, self.keys.dtype, device)

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            shape = (len(prefixes), length, *key.shape[1:])
            self.keys[layer, slots, :length] = self.turn(key).view(shape)
            self.values[layer, slots, :length] = value.reshape(shape)
            return dense(layer, query, key, value)

        tokens = torch.tensor(prefixes, dtype=torch.int64, device=device).flatten()
        decoder.forward(tokens, torch.arange(length, device=device).repeat(len(prefixes)), attention)


def _prefix(entry: ScheduledSequence, count: int) -> Prefix:
    """The first tokens of a sequence, drafts included, that the entry's last token sees."""
    stop = min(count, entry.start + entry.num_tokens)
    known = entry.sequence.token_ids[:stop]
    return (*known, *entry.sequence.draft_token_ids[: stop - len(known)])
