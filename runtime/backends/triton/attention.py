"""Attention over pages on NVIDIA GPUs through Triton, for one step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.models.mixers.latent import Latent
from runtime.backends.base import Model, Rotary
from runtime.backends.fused_layers import indexers_unsupported
from runtime.backends.kv_pages import KVCache, TokenPages
from runtime.backends.span_attention import PLAIN_SCORES, LayerScores, Scores
from runtime.backends.torch.attention import SinkQueries, StepKeys
from runtime.backends.triton.device import num_processors, unsupported_reason
from runtime.backends.triton.fused_linear import ROWS, ROWS_LAYOUT, SUMS, ActivationLayout, QuantizedInput
from runtime.backends.triton.prefill import MIN_SPAN_TOKENS, attend_span, span_unsupported_reason
from runtime.core.batch import AttentionGroup
from runtime.core.memory_plan import MemoryPlan

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.norm_act import InputRoom
    from runtime.backends.triton.kernels.paged_attention import PreparedAttention


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


class OutputRows(NamedTuple):
    """Rows of a step's attention that the tokens of one group have.

    Attributes:
        out: `[M, heads * D]`, in the layout `form`.
        form: rows, or rows with sums.
        first: row of the first token.
    """

    out: QuantizedInput
    form: ActivationLayout = ROWS_LAYOUT
    first: int = 0

    def rows(self, count: int) -> Tensor:
        """The rows `[count, heads * D]` of the group."""
        return self.out.rows[self.first : self.first + count]


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

    Attributes:
        takes_spans: long spans of prompts are left to torch where that computes the same.
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
        self._trees = {chunk: [group.tree_in(chunk) for group in keys.batch.groups] for chunk in {None, *scores.chunks}}
        self.processors = num_processors(keys.cache.pages.memory.device)
        self.takes_spans = keys.cache.pages.memory.device.type == "cuda"
        self.sinks = SinkQueries(sinks, windows[0] or 0, rotary, keys.batch.positions) if sinks and rotary else None
        self._norm_act, self._paged_attention = norm_act, paged_attention
        self._tables = [group.blocks.view(group.num_sequences, -1) for group in keys.batch.groups]
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
        (tokens, heads, head_dim), groups = query.shape, self.keys.batch.groups
        spans = [self._is_span(layer, group, head_dim) for group in groups]
        joined = form if form.kind in (ROWS, SUMS) and not any(spans) else ROWS_LAYOUT
        out = (room or self._norm_act.InputRoom(query, tokens, query.dtype)).input(heads * head_dim, joined)
        for index, (group, is_span) in enumerate(zip(groups, spans, strict=True)):
            into, rows = OutputRows(out, joined, group.rows.start), query if len(groups) == 1 else query[group.rows]
            if is_span:
                self._attend_span(layer, index, rows, into)
            else:
                self._attend(layer, index, rows, None if moved is None else moved[group.rows], into)
        return out if joined == form else self._norm_act.convert_input(out.rows, form)

    def _is_span(self, layer: int, group: AttentionGroup, head_dim: int) -> bool:
        if not self.takes_spans or self.sinks is not None or len(group.positions) < MIN_SPAN_TOKENS:
            return False
        scheme, window = self.keys.cache.scheme, self.windows[layer]
        formats = scheme.key_format, scheme.value_format
        return not span_unsupported_reason(group, window, self.scores.of(layer), formats, head_dim)

    def _attend_span(self, layer: int, index: int, query: Tensor, into: OutputRows) -> None:
        key, value = self.keys.read(layer, index)
        into.rows(len(query)).view(query.shape).copy_(attend_span(query, key[0], value[0]))

    def _attend(self, layer: int, index: int, query: Tensor, moved: Tensor | None, into: OutputRows) -> None:
        cache, scores = self.keys.cache, self.scores.of(layer)
        source, window, sinks = cache.sources[layer], self.windows[layer], scores.sink_logits
        read, query = layer_pages(self.pages, cache.scheme, source), query.contiguous()
        front = self._sink_tokens(source, index, moved)
        key = index, query.shape, read.pages[0].shape[2], window, scores.chunk, sinks is None, into.form.kind
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._prepare(index, query, read, window, front, scores, into)
        prepared(query, read, front, sinks, into)

    def _prepare(
        self,
        index: int,
        query: Tensor,
        read: HeadPages,
        window: int | None,
        front: SinkTokens,
        scores: LayerScores,
        into: OutputRows,
    ) -> PreparedAttention:
        """Attention of a group for all layers with the same heads, windows and changes of scores."""
        group, tree = self.keys.batch.groups[index], self._trees[scores.chunk][index]
        cut = self._cut(group, query, read.pages[0].shape[2])
        ancestors = None if tree is None else tree[1]
        return self._paged_attention.prepare(
            query, read, self._tables[index], group.positions, window, *cut, front, ancestors, scores, into.form
        )

    def _cut(self, group: AttentionGroup, query: Tensor, kv_heads: int) -> tuple[int, int]:
        """Rows of a program and splits of the context."""
        tokens, heads, head_dim = query.shape
        sizes = block_rows(head_dim)
        rows = tokens // group.num_sequences * (heads // kv_heads)
        rows_of_program = next((most for most in sizes if rows <= most), sizes[-1])
        programs = group.num_sequences * -(-rows // rows_of_program) * kv_heads
        return rows_of_program, num_splits(group.num_keys, programs, self.processors)

    def _sink_tokens(self, layer: int, index: int, moved: Tensor | None) -> SinkTokens:
        exact, slots = self.keys.cache.sinks, self.keys.sink_slots
        if moved is None and exact is None:
            return NO_SINK_TOKENS
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
