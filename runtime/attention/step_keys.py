"""The keys and values of one step: written to the cache, and read back as the step's queries see them."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from runtime.attention.spans import visibility_mask
from runtime.batch import AttentionGroup, Batch
from runtime.model.kv_cache import ExactPlaces, KVCache
from runtime.model.recent import RecentStore


class StepKeys:
    """What an attention over pages reads, group by group.

    A token always reads its keys back from the cache, its own included, so the result does not depend on how a prompt
    was cut into spans or on what else is in the batch. Exact sinks stand in the place of what the pages hold of them.
    With a recent window exact keys are appended to those of the pages, and of each key a query sees either the one or
    the other: which one depends on its distance only.

    Attributes:
        sink_slots: of each group, int64 `[num_sequences]` into the exact sinks; None without any.
    """

    def __init__(self, cache: KVCache, batch: Batch, places: ExactPlaces) -> None:
        self.cache, self.batch = cache, batch
        stops = list(accumulate(group.num_sequences for group in batch.groups))
        members = [slice(stop - group.num_sequences, stop) for group, stop in zip(batch.groups, stops, strict=True)]
        self.sink_slots = None if places.sinks is None else [places.sinks[part] for part in members]
        self._rings = None if places.rings is None else [places.rings[part] for part in members]
        self._exact: list[tuple[Tensor, Tensor]] = []

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the step's turned key and value `[T, kv_heads, D]`."""
        self.cache.pages.write(layer, self.batch.slots, key, value)
        if self.cache.recent is not None and self._rings is not None:
            self._exact = [
                self._exchange(self.cache.recent, layer, rings, group, key, value)
                for rings, group in zip(self._rings, self.batch.groups, strict=True)
            ]

    def read(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        """Key and value `[B, keys, kv_heads, D]` for the B sequences of a group, after `write` of the same layer."""
        group = self.batch.groups[index]
        key, value = (
            pages.view(group.num_sequences, -1, *pages.shape[1:])[:, : group.num_keys]
            for pages in self.cache.pages.gather(layer, group.blocks)
        )
        if self.cache.sinks is not None and self.sink_slots is not None:
            count = min(self.cache.sinks.count, group.num_keys)
            key[:, :count] = self.cache.sinks.keys[layer, self.sink_slots[index], :count]
            value[:, :count] = self.cache.sinks.values[layer, self.sink_slots[index], :count]
        if not self._exact:
            return key, value
        exact_key, exact_value = self._exact[index]
        return torch.cat((key, exact_key), 1), torch.cat((value, exact_value), 1)

    def needs_mask(self, group: AttentionGroup, window: int | None) -> bool:
        """False when causality says it all."""
        return bool(self._rings) or group.ragged or (window is not None and window < group.num_keys)

    def mask(self, group: AttentionGroup, window: int | None, dtype: torch.dtype, sinks: int = 0) -> Tensor:
        """Additive `[rows, keys]`; the last `window` tokens and the first `sinks` are visible."""
        recent = self.cache.scheme.recent
        seen = visibility_mask(group.positions, group.num_keys, window, dtype, sinks, group.tree)
        if not recent:
            return seen
        keys = torch.arange(group.num_keys, device=seen.device)
        far = seen.masked_fill_(keys > group.positions.unsqueeze(-1) - recent, float("-inf"))
        return torch.cat((far, _recent_mask(group, min(recent, window or recent), recent, dtype)), -1)

    def _exchange(
        self, recent: RecentStore, layer: int, rings: Tensor, group: AttentionGroup, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The exact key and value of the group's own tokens and those just before them; the rings are up to date then,
        which may overwrite what was read."""
        shape = (group.num_sequences, -1, *key.shape[1:])
        own = key[group.rows].reshape(shape), value[group.rows].reshape(shape)
        positions = self.batch.positions[group.rows].view(group.num_sequences, -1)
        before = recent.read(layer, rings, positions[:, 0])
        recent.write(layer, rings, positions, *own)
        return torch.cat((before[0], own[0]), 1), torch.cat((before[1], own[1]), 1)


def _recent_mask(group: AttentionGroup, window: int, recent: int, dtype: torch.dtype) -> Tensor:
    """Additive `[rows, recent - 1 + n]` over the exact keys of n tokens and of those before them."""
    positions = group.positions.view(group.num_sequences, -1)
    num_tokens = positions.shape[1]
    columns = positions[:, :1] + torch.arange(1 - recent, num_tokens, device=positions.device)
    last, columns = positions.unsqueeze(-1), columns.unsqueeze(1)
    hidden = ((columns > last) | (columns <= last - window) | (columns < 0)).flatten(0, 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
