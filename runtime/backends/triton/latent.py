"""Latent attention over pages on NVIDIA GPUs through Triton, for one step."""

from __future__ import annotations

from itertools import takewhile

import torch
from torch import Tensor

from runtime.backends.latent import LatentProducts
from runtime.backends.scores import Scores
from runtime.backends.torch.attention import StepKeys
from runtime.backends.triton.attention import StepTiles, layer_pages, ragged_rows, token_pages
from runtime.backends.triton.tiling import Tiling
from runtime.core.batch import AttentionGroup

BLOCK_ROWS = (16, 32)
"""Rows that one program may have, a row being a token and a head: registers hold no more sums of 512 channels."""
MIN_SPAN_PRODUCTS = 2**20
"""Tokens times keys of a span from which on products with expanded keys save more than their launches cost."""


class TritonLatentAttention:
    """As `PagedAttention` for latent attention: stores the step's latents and rotated keys, then all sequences attend
    in one launch. Long spans, which take fewer products with expanded keys and values, are computed by plain torch.

    Args:
        keys: what is read; without exact tokens.
        windows: sliding window of every layer; None is none.
        scores: of the model.
    """

    def __init__(self, keys: StepKeys, windows: tuple[int | None, ...], scores: Scores) -> None:
        self.keys, self.windows, self.scores, self.pages = keys, windows, scores, token_pages(keys.cache)
        self._rows, self._device = ragged_rows(keys.batch), keys.cache.pages.memory.device
        self._tiles: dict[int, StepTiles] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Outputs `[T, heads, V]` of query `[T, heads, K + R]`, key `[T, 1, R]` and latent `[T, 1, rank]`."""
        cache, heads, groups = self.keys.cache, self._heads(layer), self.keys.batch.groups
        if cache.scheme.rotate:
            query = heads.rotated(query, cache.rotate)
        self.keys.write(layer, cache.rotate(key), value)
        # The longest spans are the last groups, each of one sequence.
        rotated = query.shape[-1] - heads.shape.own
        first = len(groups) - sum(1 for _ in takewhile(lambda g: self._expands(heads, g, rotated), reversed(groups)))
        spans = [self._attend_span(layer, heads, index, query) for index in range(first, len(groups))]
        if spans and not first:
            return spans[0] if len(spans) == 1 else torch.cat(spans)
        rest = (query[: groups[first].rows.start] if spans else query).contiguous()
        sums = self._attend_absorbed(layer, heads, len(self._rows.tables) - len(spans), rest)
        absorbed = heads.values(sums.transpose(0, 1))
        return torch.cat((absorbed, *spans)) if spans else absorbed

    def _heads(self, layer: int) -> LatentProducts:
        heads = self.scores.latent(layer)
        if heads is None:
            raise ValueError(f"layer {layer} has no latents")
        return heads

    def _expands(self, heads: LatentProducts, group: AttentionGroup, rotated: int) -> bool:
        """Whether a group is a long span; the lengths of captured steps are not known."""
        tokens, keys = len(group.positions), group.num_keys
        if group.num_sequences > 1 or not self._rows.lengths or tokens * keys < MIN_SPAN_PRODUCTS:
            return False
        return heads.expands(tokens, keys, rotated)

    def _attend_span(self, layer: int, heads: LatentProducts, index: int, query: Tensor) -> Tensor:
        rows = query[self.keys.batch.groups[index].rows]
        key, latent = self.keys.read(layer, index)
        return heads.attend_span(rows, key[0], latent[0], self.keys.span_mask(index, self.windows[layer], query.dtype))

    def _attend_absorbed(self, layer: int, heads: LatentProducts, count: int, query: Tensor) -> Tensor:
        """Sums of latents `[n, heads, rank]` of the first `count` sequences."""
        from runtime.backends.triton.kernels.latent_attention import attend_latents

        if count not in self._tiles:
            rows = self._rows if count == len(self._rows.tables) else self._rows.first(count)
            self._tiles[count] = StepTiles(rows, self._device)
        tiles, window, num_heads = self._tiles[count], self.windows[layer], query.shape[1]
        size = BLOCK_ROWS[tiles.rows.longest * num_heads > BLOCK_ROWS[0]]
        listed = tiles.of(Tiling(size, num_heads, 1, tiles.programs, window or 0), len(query))
        read = layer_pages(self.pages, self.keys.cache.scheme, self.keys.cache.sources[layer])
        return attend_latents(*heads.split(query), read, tiles.rows, listed, size, heads.scale, window)
