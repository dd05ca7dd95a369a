"""The keys and values of one step: written to the cache, and read back as the step's queries see them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from runtime.backends.base import Rotary
from runtime.backends.exact_tokens import ResidualWindow
from runtime.backends.indexer import ChosenSlots, ChosenTokens, IndexedTokens
from runtime.backends.kv_pages import ExactPlaces, KVCache, TokenPages
from runtime.backends.scores import PLAIN_SCORES, Scores
from runtime.backends.span_attention import attend_span, attend_tokens, visibility_mask
from runtime.backends.torch.ops import rotate
from runtime.core.batch import AttentionGroup, Batch

Chosen = Tensor | ChosenSlots | None
"""Mask of a group, or the places of what its rows see."""


class StepKeys:
    """Keys and values that an attention over pages reads, group by group.

    A token always reads its keys back from the cache, its own included, so the result does not depend on how a prompt
    was cut into spans or on what else is in the batch. Exact sinks stand in the place of what the pages hold of them.
    With a recent window exact keys are appended to those of the pages, and of each key a query sees either the one or
    the other: which one depends on its distance only.

    Attributes:
        places: of what the step's sequences keep exactly.
        sink_slots: of each group, int64 `[num_sequences]` into the exact sinks; None without any.
    """

    def __init__(self, cache: KVCache, batch: Batch, places: ExactPlaces) -> None:
        self.cache, self.batch, self.places = cache, batch, places
        stops = list(accumulate(group.num_sequences for group in batch.groups))
        members = [slice(stop - group.num_sequences, stop) for group, stop in zip(batch.groups, stops, strict=True)]
        self.sink_slots = None if places.sinks is None else [places.sinks[part] for part in members]
        self._rings = None if places.rings is None else [places.rings[part] for part in members]
        self._exact: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the step's Hadamard-rotated key and value `[T, kv_heads, D]`, unless the layer reads another's."""
        if self.cache.sources[layer] != layer:
            return
        self.cache.pages.write(layer, self.batch.slots, key, value)
        if self.cache.residual_window is not None and self._rings is not None:
            kept = {source: exact for source, exact in self._exact.items() if source in self.cache.sources[layer:]}
            self._exact = kept | {
                layer: [
                    self._exchange(self.cache.residual_window, layer, rings, group, key, value)
                    for rings, group in zip(self._rings, self.batch.groups, strict=True)
                ]
            }

    def read(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        """Key and value `[B, keys, kv_heads, D]` for the B sequences of a group, after `write` of the same layer."""
        group, layer = self.batch.groups[index], self.cache.sources[layer]
        key, value = (
            pages.view(group.num_sequences, -1, *pages.shape[1:])[:, : group.num_keys]
            for pages in self.cache.pages.gather(layer, group.blocks)
        )
        if self.cache.sinks is not None and self.sink_slots is not None:
            count = min(self.cache.sinks.count, group.num_keys)
            key[:, :count] = self.cache.sinks.keys[layer][self.sink_slots[index], :count]
            value[:, :count] = self.cache.sinks.values[layer][self.sink_slots[index], :count]
        if not self._exact:
            return key, value
        exact_key, exact_value = self._exact[layer][index]
        return torch.cat((key, exact_key), 1), torch.cat((value, exact_value), 1)

    def choose(
        self, layer: int, tokens: IndexedTokens, masks: Sequence[Tensor | None], window: int | None, chunk: int | None
    ) -> list[Chosen]:
        """Stores the index keys of a layer, and chooses keys of every group; its mask where all are seen."""
        self.pages.write_index(layer, self.batch.slots, tokens.key)
        groups = zip(self.batch.groups, masks, strict=True)
        return [
            self._choose(layer, group, tokens, mask, (window, chunk)) if group.num_keys > tokens.num_chosen else mask
            for group, mask in groups
        ]

    def _choose(
        self,
        layer: int,
        group: AttentionGroup,
        tokens: IndexedTokens,
        mask: Tensor | None,
        within: tuple[int | None, int | None],
    ) -> Chosen:
        (window, chunk), recent = within, self.cache.scheme.residual_length
        index_key = self.pages.gather_index(layer, group.blocks).unflatten(0, (group.num_sequences, -1))
        dtype, tree = self.cache.pages.dtype, group.tree_in(chunk)
        seen = visibility_mask(group.positions, group.num_keys, window, dtype, 0, tree, chunk)
        hidden = tokens.hidden(group.rows, index_key[:, : group.num_keys], seen)
        is_fewer = len(hidden) * tokens.num_chosen < group.num_sequences * group.num_keys
        if is_fewer and not recent and self.cache.sinks is None:
            return ChosenSlots.of(hidden, seen, self._slots(group), tokens.num_chosen)
        if recent:
            columns = _recent_columns(group, recent).clamp(min=0)
            exact = columns.repeat_interleave(len(hidden) // len(columns), 0)
            hidden = torch.cat((hidden, hidden.gather(-1, exact)), -1)
        return (seen if mask is None else mask).masked_fill(hidden, float("-inf"))

    def _slots(self, group: AttentionGroup) -> Tensor:
        """Slots of the keys of every row, int64 `[rows, keys]`."""
        size = self.pages.block_size
        inside = torch.arange(size, device=group.blocks.device)
        slots = (group.blocks.unsqueeze(-1) * size + inside).view(group.num_sequences, -1)[:, : group.num_keys]
        return slots.repeat_interleave(len(group.positions) // group.num_sequences, 0)

    @property
    def pages(self) -> TokenPages:
        """Those of the cache. Raises TypeError for pages that keep no index keys."""
        if not isinstance(self.cache.pages, TokenPages):
            raise TypeError(f"{type(self.cache.pages).__name__} keep no index keys")
        return self.cache.pages

    def read_slots(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value `[B, n, kv_heads, D]` at slots `[B, n]`, after `write` of the same layer."""
        key, value = self.pages.gather_slots(self.cache.sources[layer], slots.flatten())
        return key.unflatten(0, slots.shape), value.unflatten(0, slots.shape)

    def needs_mask(self, group: AttentionGroup, window: int | None) -> bool:
        """False when causality says it all."""
        return bool(self._rings) or group.ragged or (window is not None and window < group.num_keys)

    def mask(
        self, group: AttentionGroup, window: int | None, dtype: torch.dtype, sinks: int = 0, chunk: int | None = None
    ) -> Tensor:
        """Additive `[rows, keys]`; the last `window` tokens of the own chunk and the first `sinks` are visible."""
        recent = self.cache.scheme.residual_length
        seen = visibility_mask(group.positions, group.num_keys, window, dtype, sinks, group.tree_in(chunk), chunk)
        if not recent:
            return seen
        keys = torch.arange(group.num_keys, device=seen.device)
        far = seen.masked_fill_(keys > group.positions.unsqueeze(-1) - recent, float("-inf"))
        return torch.cat((far, _recent_mask(group, min(recent, window or recent), recent, dtype, chunk)), -1)

    def span_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the mask of a group's span, None where causality suffices; computed once for all layers with the same
        window."""
        if (window, index) not in self._masks:
            group = self.batch.groups[index]
            self._masks[window, index] = self.mask(group, window, dtype) if self.needs_mask(group, window) else None
        return self._masks[window, index]

    def _exchange(
        self, recent: ResidualWindow, layer: int, rings: Tensor, group: AttentionGroup, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The exact key and value of the group's own tokens and those just before them; the rings are up to date then,
        which may overwrite what was read."""
        each = group.num_sequences, -1
        own = key[group.rows].unflatten(0, each), value[group.rows].unflatten(0, each)
        positions = self.batch.positions[group.rows].view(group.num_sequences, -1)
        before = recent.read(layer, rings, positions[:, 0])
        recent.write(layer, rings, positions, *own)
        return torch.cat((before[0], own[0]), 1), torch.cat((before[1], own[1]), 1)


def _recent_mask(group: AttentionGroup, window: int, recent: int, dtype: torch.dtype, chunk: int | None) -> Tensor:
    """Additive `[rows, recent - 1 + n]` over the exact keys of n tokens and of those before them."""
    last = group.positions.view(group.num_sequences, -1, 1)
    columns = _recent_columns(group, recent).unsqueeze(1)
    first = torch.zeros_like(last) if chunk is None else last // chunk * chunk
    hidden = ((columns > last) | (columns <= last - window) | (columns < first)).flatten(0, 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _recent_columns(group: AttentionGroup, recent: int) -> Tensor:
    """Returns the places `[B, recent - 1 + n]` among the keys of B sequences of those that are exact as well: of the n
    own tokens and those before."""
    first = group.positions.view(group.num_sequences, -1)[:, :1]
    num_tokens = len(group.positions) // group.num_sequences
    return first + torch.arange(1 - recent, num_tokens, device=first.device)


class PagedAttention:
    """Stores the step's keys and values, then lets every group of rows look at its sequences' pages.

    Args:
        windows: sliding window of every layer; None is none.
    """

    def __init__(self, keys: StepKeys, windows: tuple[int | None, ...], scores: Scores = PLAIN_SCORES) -> None:
        self.keys, self.scores, self.seen = keys, scores, scores.seen(windows)
        dtype = keys.cache.pages.dtype
        self.masks = {
            (window, chunk): [
                keys.mask(group, window, dtype, chunk=chunk)
                if keys.needs_mask(group, min((each for each in (window, chunk) if each is not None), default=None))
                else None
                for group in keys.batch.groups
            ]
            for window, chunk in set(self.seen)
        }
        self._chosen = ChosenTokens[Chosen](scores.index_sources)

    def choose(self, layer: int, tokens: IndexedTokens) -> None:
        seen = self.seen[layer]
        self._chosen.put(layer, self.keys.choose(layer, tokens, self.masks[seen], *seen))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rotate, latent = self.keys.cache.rotate, self.scores.latent(layer)
        query = rotate(query) if latent is None else latent.rotated(query, rotate)
        self.keys.write(layer, rotate(key), value)
        masks: Sequence[Chosen] = self._chosen.of(layer) or self.masks[self.seen[layer]]
        groups = enumerate(zip(self.keys.batch.groups, masks, strict=True))
        parts = [self._attend(layer, index, query[group.rows], mask) for index, (group, mask) in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, index: int, query: Tensor, mask: Chosen) -> Tensor:
        latent = self.scores.latent(layer)
        if latent is not None and isinstance(mask, ChosenSlots):
            return latent.attend_tokens(query, *self.keys.read_slots(layer, mask.slots), mask.mask)
        if isinstance(mask, ChosenSlots):
            raise ValueError(f"layer {layer} has no latents, whose tokens were chosen")
        key, value = self.keys.read(layer, index)
        is_shared = len(key) > 1 or len(query) == 1
        if latent is not None:
            if is_shared:
                return latent.attend_tokens(query, key, value, mask)
            return latent.attend_span(query, key[0], value[0], mask)
        if is_shared:
            return attend_tokens(query, key, value, mask, self.scores.softcap, self.scores.sinks(layer))
        return attend_span(query, key[0], value[0], mask, self.scores.softcap, self.scores.sinks(layer))


class SinkQueries:
    """The second query of each token of a step: the one that looks at the sinks.

    Args:
        count, window: tokens that stay visible, from the first and up to the last one.
        rotary: of the model, with exact angles.
        positions: of the tokens, int64 `[T]`.
    """

    def __init__(self, count: int, window: int, rotary: Rotary, positions: Tensor) -> None:
        self.count = count
        self._cos, self._sin = rotary.by((count + window - 1 - positions).clamp(max=0))

    def move(self, query: Tensor) -> Tensor:
        """Rotated heads `[T, heads, D]`, moved from their own places to the last one of the cache."""
        return rotate(query, self._cos, self._sin)


class StreamingAttention:
    """As `PagedAttention`, for the same batches.

    Args:
        sinks, window: tokens that stay visible, from the first and up to the last one.
        rotary: of the model, with exact angles.
    """

    def __init__(self, keys: StepKeys, sinks: int, window: int, rotary: Rotary) -> None:
        self.keys, batch = keys, keys.batch
        self.sinks = SinkQueries(sinks, window, rotary, batch.positions)
        dtype = torch.promote_types(keys.cache.pages.dtype, torch.float32)
        self.masks = [keys.mask(group, window, dtype, sinks) for group in batch.groups]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        hadamard = self.keys.cache.rotate
        # Keys are Hadamard-rotated after their rotary embedding, and so is the query that was moved to another place.
        moved = hadamard(self.sinks.move(query))
        query = hadamard(query)
        self.keys.write(layer, hadamard(key), value)
        groups = enumerate(zip(self.keys.batch.groups, self.masks, strict=True))
        parts = [self._attend(layer, i, query[g.rows], moved[g.rows], mask) for i, (g, mask) in groups]
        return torch.cat(parts)

    def _attend(self, layer: int, index: int, query: Tensor, moved: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys.read(layer, index)
        shape = (len(key), -1, *query.shape[1:])
        mask = mask.view(len(key), 1, 1, -1, mask.shape[-1])
        attended = attend_with_sinks(query.view(shape), moved.view(shape), key, value, mask, self.sinks.count)
        return attended.reshape(query.shape)


def attend_with_sinks(query: Tensor, moved: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: int) -> Tensor:
    """Attention with one query for the first `sinks` keys and another for the rest, in plain torch.

    Args:
        query, moved: `[B, n, heads, D]`; `moved` looks at the sinks.
        key, value: `[B, L, kv_heads, D]`.
        mask: additive `[B, 1, 1, n, L]`, in at least float32; so are the scores.

    Returns:
        `[B, n, heads, D]` in the dtype of `query`.
    """
    batch, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    shape = (batch, num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = key.to(mask.dtype).permute(0, 2, 3, 1).unsqueeze(2)  # [B, kv_heads, 1, D, L]
    scores = _fold(query, shape, mask.dtype) @ keys
    scores[..., :sinks] = _fold(moved, shape, mask.dtype) @ keys[..., :sinks]
    weights = (scores * head_dim**-0.5 + mask).softmax(-1)
    attended: Tensor = weights @ value.to(mask.dtype).transpose(1, 2).unsqueeze(2)
    return attended.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


def _fold(query: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Groups query heads by the key-value head they share: `[B, kv_heads, shared, n, D]`."""
    return query.to(dtype).view(shape).permute(0, 2, 3, 1, 4)
