"""Attention sinks and a window over paged keys and values: endless streams (StreamingLLM, arXiv:2309.17453, sec. 3.2).

A token sees the first tokens, the sinks, and the last ones, the window, as if nothing had ever been between them: what
counts are positions inside of the cache. Keys are stored rotated by their place in the text all the same. To a query at
its own place in the text the window has the right distances, since rotary embeddings are relative; for the sinks there
is a second query, moved back to the last position of the cache. One softmax joins both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.attention.step_keys import StepKeys
from runtime.model.rope import Rotary


class SinkQueries:
    """The second query of each token of a step: the one that looks at the sinks.

    Args:
        count, window: tokens that stay visible, from the first and up to the last one.
        rotary: of the model, with exact angles.
        positions: of the tokens, int64 `[T]`.
    """

    def __init__(self, count: int, window: int, rotary: Rotary, positions: Tensor) -> None:
        self.count, self._rotary = count, rotary
        self._cos, self._sin = rotary.by((count + window - 1 - positions).clamp(max=0))

    def move(self, query: Tensor) -> Tensor:
        """Rotated heads `[T, heads, D]`, moved from their own places to the last one of the cache."""
        return self._rotary.rotate(query, self._cos, self._sin)


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
        turn = self.keys.cache.turn
        # Keys are turned after they are rotated by their place, and so is the query that was moved to another place.
        moved = turn(self.sinks.move(query))
        query = turn(query)
        self.keys.write(layer, turn(key), value)
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
    attended = weights @ value.to(mask.dtype).transpose(1, 2).unsqueeze(2)
    return attended.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


def _fold(query: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Query heads beside the key-value head they share: `[B, kv_heads, shared, n, D]`."""
    return query.to(dtype).view(shape).permute(0, 2, 3, 1, 4)
