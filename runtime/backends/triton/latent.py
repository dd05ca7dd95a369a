"""Latent attention over pages on NVIDIA GPUs through Triton, for one step."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.backends.latent import LatentProducts
from runtime.backends.span_attention import Scores
from runtime.backends.torch.attention import StepKeys
from runtime.backends.triton.attention import layer_pages, num_splits, token_pages
from runtime.backends.triton.device import num_processors

BLOCK_ROWS = (16, 32)
"""Rows that one program may have, a row being a token and a head: registers hold no more sums of 512 channels."""


class TritonLatentAttention:
    """As `PagedAttention` for latent attention: stores the step's latents and rotated keys, then each group of
    sequences attends in one launch. A long span, which takes fewer products with expanded keys and values, is computed
    by plain torch.

    Args:
        keys: what is read; without exact tokens.
        windows: sliding window of every layer; None is none.
        scores: of the model.
    """

    def __init__(self, keys: StepKeys, windows: tuple[int | None, ...], scores: Scores) -> None:
        self.keys, self.windows, self.scores, self.pages = keys, windows, scores, token_pages(keys.cache)
        self.processors = num_processors(keys.cache.pages.memory.device)
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Outputs `[T, heads, V]` of query `[T, heads, K + R]`, key `[T, 1, R]` and latent `[T, 1, rank]`."""
        cache, heads = self.keys.cache, self._heads(layer)
        if cache.scheme.rotate:
            query = heads.rotated(query, cache.rotate)
        self.keys.write(layer, cache.rotate(key), value)
        groups = enumerate(self.keys.batch.groups)
        parts = [self._attend(layer, heads, index, query[group.rows]) for index, group in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _heads(self, layer: int) -> LatentProducts:
        heads = self.scores.latent(layer)
        if heads is None:
            raise ValueError(f"layer {layer} has no latents")
        return heads

    def _attend(self, layer: int, heads: LatentProducts, index: int, query: Tensor) -> Tensor:
        group, own = self.keys.batch.groups[index], heads.shape.own
        if group.num_sequences == 1 and heads.expands(len(query), group.num_keys, query.shape[-1] - own):
            key, latent = self.keys.read(layer, index)
            return heads.attend_span(query, key[0], latent[0], self._mask(layer, index, query.dtype))
        return heads.values(self._attend_absorbed(layer, heads, index, query.contiguous()))

    def _attend_absorbed(self, layer: int, heads: LatentProducts, index: int, query: Tensor) -> Tensor:
        """Sums of latents `[heads, n, rank]` of a group."""
        from runtime.backends.triton.kernels.latent_attention import attend_latents

        group, (absorbed, rotated) = self.keys.batch.groups[index], heads.split(query)
        rows = len(query) // group.num_sequences * query.shape[1]
        block_rows = BLOCK_ROWS[rows > BLOCK_ROWS[0]]
        programs = group.num_sequences * -(-rows // block_rows)
        return attend_latents(
            absorbed,
            rotated,
            layer_pages(self.pages, self.keys.cache.scheme, self.keys.cache.sources[layer]),
            group.blocks.view(group.num_sequences, -1),
            group.positions,
            heads.scale,
            self.windows[layer],
            block_rows,
            num_splits(group.num_keys, programs, self.processors),
            group.ancestors,
        )

    def _mask(self, layer: int, index: int, dtype: torch.dtype) -> Tensor | None:
        """The mask of a span, None where causality says it all; made once for all layers with the same window."""
        group, window = self.keys.batch.groups[index], self.windows[layer]
        if (window, index) not in self._masks:
            needed = self.keys.needs_mask(group, window)
            self._masks[window, index] = self.keys.mask(group, window, dtype) if needed else None
        return self._masks[window, index]
