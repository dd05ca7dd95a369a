"""Attention over pages on NVIDIA GPUs through Triton, for one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.models.mixers.latent import Latent
from runtime.backends.base import Model, Rotary
from runtime.backends.fused_layers import indexers_unsupported
from runtime.backends.kv_pages import KVCache, TokenPages
from runtime.backends.span_attention import PLAIN_SCORES, Scores
from runtime.backends.torch.attention import SinkQueries, StepKeys
from runtime.backends.triton.linear import num_processors, unsupported_reason
from runtime.core.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class HeadPages:
    """Keys and values of one layer.

    Attributes:
        pages, scales: of keys and of values, `[blocks, block_size, kv_heads, ...]`; without scales the pages again.
        formats: of keys and of values, a name of `paged_attention.FORMS` each.
        hadamard: keys, and queries with them, are Hadamard-rotated.
    """

    pages: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    formats: tuple[str, str]
    hadamard: bool


def layer_pages(pages: TokenPages, scheme: KVCacheScheme, layer: int) -> HeadPages:
    """Those of one layer that writes them, in the layouts of plain torch."""
    return HeadPages(*pages.stored(layer), (scheme.key_format, scheme.value_format), scheme.rotate)


@dataclass(frozen=True, slots=True)
class SinkTokens:
    """Tokens at the beginning of every sequence that are read in another way.

    Attributes:
        sinks: that are seen whatever the window, by the queries `moved [B * n, heads, D]`; 0 is none.
        exact: keys and values `[slots, count, kv_heads, D]` in the dtype of the query, in the place of the first
            `count` in the pages; None is none.
        slots: int64 `[B]`, of the exact ones of each sequence.
    """

    sinks: int = 0
    moved: Tensor | None = None
    exact: tuple[Tensor, Tensor] | None = None
    slots: Tensor | None = None


NO_SINK_TOKENS = SinkTokens()


HEAD_DIMS = (32, 64, 128, 256, 512)
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


class TritonAttention:
    """As `PagedAttention`, or with sinks as `StreamingAttention`: stores the step's keys and values, then each group of
    sequences attends in one launch.

    Args:
        keys: what is read; without a recent window.
        windows: sliding window of every layer; None is none.
        scores: of the model; plain ones where there are `sinks`.
        sinks: first tokens that stay visible beside the window; needs one, the same in all layers.
        rotary: of the model, with exact angles; for sinks.
    """

    def __init__(
        self,
        keys: StepKeys,
        windows: tuple[int | None, ...],
        scores: Scores = PLAIN_SCORES,
        sinks: int = 0,
        rotary: Rotary | None = None,
    ) -> None:
        self.keys, self.windows, self.scores, self.pages = keys, windows, scores, token_pages(keys.cache)
        self._trees = {chunk: [group.tree_in(chunk) for group in keys.batch.groups] for chunk in {None, *scores.chunks}}
        self.processors = num_processors(keys.cache.pages.memory.device)
        self.sinks = SinkQueries(sinks, windows[0] or 0, rotary, keys.batch.positions) if sinks and rotary else None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = self.keys.cache
        moved = cache.rotate(self.sinks.move(query)) if self.sinks else None
        query = cache.rotate(query)
        self.keys.write(layer, cache.rotate(key), value)
        return self.attend(layer, query, moved)

    def attend(self, layer: int, query: Tensor, moved: Tensor | None = None) -> Tensor:
        """Attention of the step's Hadamard-rotated queries `[T, heads, D]` over keys and values that are written.
        With sinks, `moved` are those that look at them."""
        groups = enumerate(self.keys.batch.groups)
        parts = [self._attend(layer, i, query[g.rows], None if moved is None else moved[g.rows]) for i, g in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, index: int, query: Tensor, moved: Tensor | None) -> Tensor:
        from runtime.backends.triton.kernels.paged_attention import attend

        group, cache, scores = self.keys.batch.groups[index], self.keys.cache, self.scores.of(layer)
        source, tree = cache.sources[layer], self._trees[scores.chunk][index]
        read = layer_pages(self.pages, cache.scheme, source)
        kv_heads = read.pages[0].shape[2]
        rows = len(query) // group.num_sequences * (query.shape[1] // kv_heads)
        sizes = block_rows(query.shape[2])
        rows_of_program = next((most for most in sizes if rows <= most), sizes[-1])
        programs = group.num_sequences * -(-rows // rows_of_program) * kv_heads
        return attend(
            query.contiguous(),
            read,
            group.blocks.view(group.num_sequences, -1),
            group.positions,
            self.windows[layer],
            rows_of_program,
            num_splits(group.num_keys, programs, self.processors),
            self._sink_tokens(source, index, moved),
            None if tree is None else tree[1],
            scores,
        )

    def _sink_tokens(self, layer: int, index: int, moved: Tensor | None) -> SinkTokens:
        exact, slots = self.keys.cache.sinks, self.keys.sink_slots
        return SinkTokens(
            self.sinks.count if self.sinks else 0,
            None if moved is None else moved.contiguous(),
            (exact.keys[layer], exact.values[layer]) if exact and slots else None,
            slots[index] if exact and slots else None,
        )


def token_pages(cache: KVCache) -> TokenPages:
    """The pages of a cache. Raises TypeError for another layout than those of plain torch."""
    if not isinstance(cache.pages, TokenPages):
        raise TypeError(f"{type(cache.pages).__name__} are not in the layouts of plain torch")
    return cache.pages


def block_rows(head_dim: int) -> tuple[int, ...]:
    """Rows that one program may have, a row being a token and one of the query heads that share a kv head: tensor cores
    take no fewer than 16, and registers hold no more."""
    return tuple(most for most in (16, 32, 64) if most * head_dim <= 8192)


def num_splits(num_keys: int, programs: int, processors: int) -> int:
    """Into how many stretches the context is cut: two programs per processor, none with less than its fixed costs."""
    return max(1, min(2 * processors // programs, num_keys // MIN_SPLIT_TOKENS, MAX_SPLITS))


def attention_unsupported_reason(model: Model, memory: MemoryPlan) -> str:
    """Why this attention cannot serve a model; "" when it can."""
    if reason := unsupported_reason(model.device, model.dtype):
        return reason
    if reason := indexers_unsupported(model.config.spec):
        return reason
    if latents := [mixer.latent for mixer in model.config.spec.attentions if mixer.latent is not None]:
        return latents_unsupported_reason(latents[0], memory.kv_cache)
    if odd := set(model.config.head_dims) - set(HEAD_DIMS):
        return f"takes heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not {min(odd)}"
    # Which keys are exact changes with every token, so they would be a second set of pages with a mask.
    return "reads no exact recent window" if memory.kv_cache.residual_length else ""


LATENT_RANKS, ROTATED_CHANNELS = (128, 256, 512), (32, 64, 128)
"""Channels of a latent and of a rotated key."""
LATENT_FORMATS = ("16bit", "fp8", "int8")


def latents_unsupported_reason(latent: Latent, scheme: KVCacheScheme) -> str:
    """Why latents cannot be read; "" when they can."""
    if latent.rank not in LATENT_RANKS or latent.rotated not in ROTATED_CHANNELS:
        sizes = (", ".join(map(str, numbers)) for numbers in (LATENT_RANKS, ROTATED_CHANNELS))
        return "takes latents of {} channels and rotated keys of {}".format(*sizes)
    if not {scheme.key_format, scheme.value_format} <= set(LATENT_FORMATS):
        return f"reads latents as {', '.join(LATENT_FORMATS)}"
    return "reads no exact tokens beside latents" if scheme.sinks or scheme.residual_length else ""
