"""Attention over pages on NVIDIA GPUs through Triton, for one step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.models.mixers.latent import Latent
from runtime.backends.base import Rotary
from runtime.backends.fused_layers import indexers_unsupported
from runtime.backends.kv_pages import KVCache, TokenPages
from runtime.backends.model import Model
from runtime.backends.scores import PLAIN_SCORES, LayerScores, Scores
from runtime.backends.torch.attention import SinkQueries, StepKeys
from runtime.backends.triton.device import num_processors, unsupported_reason
from runtime.backends.triton.fused_linear import ROWS_LAYOUT, ActivationLayout, QuantizedInput
from runtime.backends.triton.prefill import attend_span, span_unsupported_reason
from runtime.backends.triton.tiling import PROGRAMS_PER_PROCESSOR, Tiling, tile_rows
from runtime.core.batch import Batch, RaggedRows
from runtime.core.memory_plan import MemoryPlan

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.norm_act import InputRoom
    from runtime.backends.triton.kernels.paged_attention import PreparedAttention
    from runtime.backends.triton.kernels.tile_list import TileList


class HeadPages(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        pages, scales: of keys and of values, `[blocks, block_size, kv_heads, ...]`; without scales the pages again.
        formats: of keys and of values, a name of `attention_tiles.FORMS` each.
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

    @property
    def forms(self) -> tuple[bool, bool]:
        """Whether there are second queries, and exact tokens."""
        return self.sinks > 0, self.exact is not None

    @property
    def queries(self) -> tuple[Tensor, ...]:
        return () if self.moved is None else (self.moved,)

    @property
    def exact_tensors(self) -> tuple[Tensor, ...]:
        """Exact keys, values and their slots, or nothing."""
        return () if self.exact is None or self.slots is None else (*self.exact, self.slots)

    @property
    def num_exact(self) -> int:
        return 0 if self.exact is None else self.exact[0].shape[1]


NO_SINK_TOKENS = SinkTokens()


HEAD_DIMS = (32, 64, 128, 256, 512)


class TritonAttention:
    """As `PagedAttention`, or with sinks as `StreamingAttention`: stores the step's keys and values, then all sequences
    attend in one launch.

    Args:
        keys: what is read; without a recent window.
        windows: sliding window of every layer; None is none.
        scores: of the model; plain ones where there are `sinks`.
        sinks: first tokens that stay visible outside of the window; needs one, the same in all layers.
        rotary: of the model, with exact angles; for sinks.

    Attributes:
        takes_spans: a step that is one long span over quantized pages is left to torch where that computes the same.
    """

    def __init__(
        self,
        keys: StepKeys,
        windows: tuple[int | None, ...],
        scores: Scores = PLAIN_SCORES,
        sinks: int = 0,
        rotary: Rotary | None = None,
    ) -> None:
        from runtime.backends.triton.kernels import norm_act, paged_attention

        self.keys, self.windows, self.scores, self.pages = keys, windows, scores, token_pages(keys.cache)
        self.tiles = StepTiles(ragged_rows(keys.batch), keys.cache.pages.memory.device)
        self.takes_spans = keys.cache.pages.memory.device.type == "cuda"
        self.sinks = SinkQueries(sinks, windows[0] or 0, rotary, keys.batch.positions) if sinks and rotary else None
        self._norm_act, self._paged_attention = norm_act, paged_attention
        self._prepared: dict[Hashable, PreparedAttention] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = self.keys.cache
        moved = cache.rotate(self.sinks.move(query)) if self.sinks else None
        query = cache.rotate(query)
        self.keys.write(layer, cache.rotate(key), value)
        return self.attend(layer, query, moved).rows.view(query.shape)

    def attend(
        self,
        layer: int,
        query: Tensor,
        moved: Tensor | None = None,
        form: ActivationLayout = ROWS_LAYOUT,
        room: InputRoom | None = None,
    ) -> QuantizedInput:
        """Attention `[T, heads * D]` of the step's Hadamard-rotated queries `[T, heads, D]` over keys and values that
        are written, in a form, in new memory or a room. With sinks, `moved` are those that look at them."""
        tokens, heads, head_dim = query.shape
        room = room or self._norm_act.InputRoom(query, tokens, query.dtype)
        if self._is_span(layer, head_dim):
            key, value = self.keys.read(layer, 0)
            return self._norm_act.convert_input(attend_span(query, key[0], value[0]).flatten(1), form)
        cache, scores = self.keys.cache, self.scores.of(layer)
        source, window, sinks = cache.sources[layer], self.windows[layer], scores.sink_logits
        read, query = layer_pages(self.pages, cache.scheme, source), query.contiguous()
        front = self._sink_tokens(source, moved)
        kind = query.shape, read.pages[0].shape[2], window, scores.chunk, sinks is None
        prepared = self._prepared.get(kind)
        if prepared is None:
            prepared = self._prepared[kind] = self._prepare(query, read, window, front, scores)
        stored = prepared.joined(form)
        out = room.input(heads * head_dim, stored)
        prepared(query, read, front, sinks, out, stored)
        return out if stored == form else self._norm_act.convert_input(out.rows, form)

    def _is_span(self, layer: int, head_dim: int) -> bool:
        """Whether the step is one span over quantized pages that torch attends to; lengths of captured steps are not
        known."""
        if not self.takes_spans or self.sinks is not None or len(self.tiles.rows.lengths) != 1:
            return False
        scheme, window, (group,) = self.keys.cache.scheme, self.windows[layer], self.keys.batch.groups
        formats = scheme.key_format, scheme.value_format
        return not span_unsupported_reason(group, window, self.scores.of(layer), formats, head_dim)

    def _prepare(
        self, query: Tensor, read: HeadPages, window: int | None, front: SinkTokens, scores: LayerScores
    ) -> PreparedAttention:
        """Attention for all layers with the same heads, windows and changes of scores."""
        (tokens, heads, head_dim), kv_heads = query.shape, read.pages[0].shape[2]
        rows = self.tiles.rows
        tiling = Tiling(
            tile_rows(head_dim, rows.longest * (heads // kv_heads)),
            heads // kv_heads,
            kv_heads,
            self.tiles.programs,
            min((limit for limit in (window, scores.chunk) if limit is not None), default=0),
        )
        listed = self.tiles.of(tiling, tokens)
        return self._paged_attention.prepare(query, read, rows, listed, tiling.rows, window, front, scores)

    def _sink_tokens(self, layer: int, moved: Tensor | None) -> SinkTokens:
        exact, slots = self.keys.cache.sinks, self.keys.places.sinks
        if moved is None and exact is None:
            return NO_SINK_TOKENS
        return SinkTokens(
            self.sinks.count if self.sinks else 0,
            None if moved is None else moved.contiguous(),
            (exact.keys[layer], exact.values[layer]) if exact else None,
            slots,
        )


class StepTiles:
    """Work lists of a step, one for each cut of its rows."""

    def __init__(self, rows: RaggedRows, device: torch.device) -> None:
        self.rows, self.programs = rows, PROGRAMS_PER_PROCESSOR * num_processors(device)
        self._lists: dict[Tiling, TileList] = {}

    def of(self, tiling: Tiling, num_tokens: int) -> TileList:
        """Returns the list for a cut, computed once."""
        from runtime.backends.triton.kernels.tile_list import tile_list

        if tiling not in self._lists:
            self._lists[tiling] = tile_list(self.rows, num_tokens, tiling)
        return self._lists[tiling]


def ragged_rows(batch: Batch) -> RaggedRows:
    """Returns the rows of a step by sequence. Raises ValueError for a batch that has its groups only."""
    if batch.ragged is None:
        raise ValueError("the batch was not laid out by sequence")
    return batch.ragged


def token_pages(cache: KVCache) -> TokenPages:
    """The pages of a cache. Raises TypeError for another layout than those of plain torch."""
    if not isinstance(cache.pages, TokenPages):
        raise TypeError(f"{type(cache.pages).__name__} are not in the layouts of plain torch")
    return cache.pages


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
    return "reads no exact tokens next to latents" if scheme.sinks or scheme.residual_length else ""
