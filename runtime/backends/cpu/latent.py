"""Compiled absorbed latent attention (`latent.h`) over pages in the layouts of plain torch."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import EXACT
from compress.cpu.binding import BEST, absence, function, library, struct_fields
from runtime.backends import kv_pages
from runtime.backends.cpu.attention_call import PagedAttentionCall, ancestors_of, spans_of
from runtime.backends.cpu.kv_pages import make_pages as make_head_pages
from runtime.backends.kv_pages import KVPages, TokenPages
from runtime.backends.latent import LatentProducts, LatentShape
from runtime.backends.model import Model
from runtime.backends.scores import Scores
from runtime.backends.torch.attention import StepKeys
from runtime.core.batch import AttentionGroup, Batch
from runtime.core.memory_plan import MemoryPlan

FORMATS = {EXACT: 0, "int8": 1, "fp8": 2, "int4": 3}
"""Numbers of formats in latent.h."""
WIDTH_STEP, LONGEST = 32, 640


class _LatentPart(ctypes.Structure):
    """`LatentPart` of latent.h."""

    _fields_ = struct_fields("int64 size format", "pointer codes scales")


class _LatentCall(ctypes.Structure):
    """`LatentAttention` of latent.h."""

    _fields_ = struct_fields(
        ("attention", PagedAttentionCall),
        "int64 width block_size",
        ("latents", _LatentPart),
        ("keys", _LatentPart),
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """Rows of a step by how they are computed.

    Attributes:
        expanded: groups whose keys and values are expanded, by plain torch.
        rows: of the other groups, which are absorbed, int64.
        spans, blocks, ancestors: of these rows side by side, as attention.h takes them.
    """

    expanded: tuple[int, ...]
    rows: Tensor
    spans: Tensor
    blocks: Tensor
    ancestors: Tensor | None


class CpuLatentAttention:
    """As `PagedAttention` for latent attention: stores latents and rotated keys of a step, then all sequences attend in
    one call. A long span, which takes fewer products with expanded keys and values, is computed by plain torch.

    Args:
        keys: what is read; without exact tokens.
        windows: sliding window of every layer; None is none.
        scores: of the model.
        instruction_set: of the compiled code.

    Raises:
        ValueError: an instruction set that this machine lacks, when it is called.
    """

    def __init__(
        self, keys: StepKeys, windows: tuple[int | None, ...], scores: Scores, instruction_set: int = BEST
    ) -> None:
        self.keys, self.windows, self.scores, self.instruction_set = keys, windows, scores, instruction_set
        if not isinstance(keys.cache.pages, TokenPages):
            raise TypeError(f"{type(keys.cache.pages).__name__} are not in the layouts of plain torch")
        self._pages = keys.cache.pages
        self._attend = function("latent_attention", c_void_p, c_int)
        self._splits: dict[tuple[LatentShape, int], _Split] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Outputs `[T, heads, V]` of query `[T, heads, K + R]`, key `[T, 1, R]` and latent `[T, 1, rank]`."""
        cache, heads = self.keys.cache, self.scores.latent(layer)
        if heads is None:
            raise ValueError(f"layer {layer} has no latents")
        query = heads.rotated(query, cache.rotate) if cache.scheme.rotate else query
        self.keys.write(layer, cache.rotate(key), value)
        split = self._split(heads, key.shape[-1])
        if not split.expanded:
            return self._attend_absorbed(layer, heads, query, split)
        out = query.new_empty(*query.shape[:2], heads.shape.value_dim)
        for index in split.expanded:
            rows = self.keys.batch.groups[index].rows
            keys, latents = self.keys.read(layer, index)
            mask = self.keys.span_mask(index, self.windows[layer], query.dtype)
            out[rows] = heads.attend_span(query[rows], keys[0], latents[0], mask)
        if len(split.rows):
            out[split.rows] = self._attend_absorbed(layer, heads, query[split.rows], split)
        return out

    def _split(self, heads: LatentProducts, rotated: int) -> _Split:
        """Decides how the groups of the step are computed, once for all layers of one shape."""
        shape = heads.shape, rotated
        if shape not in self._splits:
            groups = self.keys.batch.groups
            expanded = tuple(i for i, group in enumerate(groups) if _expands(heads, group, rotated))
            self._splits[shape] = _lay_out(self.keys.batch, expanded)
        return self._splits[shape]

    def _attend_absorbed(self, layer: int, heads: LatentProducts, query: Tensor, split: _Split) -> Tensor:
        absorbed, rotated = heads.split(query)
        rank, used = absorbed.shape[-1], absorbed.shape[-1] + rotated.shape[-1]
        width = -(-used // WIDTH_STEP) * WIDTH_STEP
        queries = query.new_zeros(*query.shape[:2], width)
        queries[..., :rank], queries[..., rank:used] = absorbed.transpose(0, 1), rotated
        out = torch.empty_like(queries)
        call = self._call(layer, (rank, rotated.shape[-1]), queries, out, split)
        call.attention.scale = heads.scale
        if self._attend(ctypes.addressof(call), self.instruction_set):
            raise ValueError(f"this machine lacks instruction set {self.instruction_set}, or memory")
        return heads.values(out[..., :rank].transpose(0, 1))

    def _call(self, layer: int, sizes: tuple[int, int], queries: Tensor, out: Tensor, split: _Split) -> _LatentCall:
        """Arguments for latents and rotated keys of these `sizes`."""
        (keys, latents), scales = self._pages.stored(self.keys.cache.sources[layer])
        scheme, window = self.keys.cache.scheme, self.windows[layer]
        attention = PagedAttentionCall(
            heads=queries.shape[1],
            window=window or 0,
            query=queries.data_ptr(),
            query_row=queries.stride(0),
            out=out.data_ptr(),
            num_spans=len(split.spans),
            spans=split.spans.data_ptr(),
            blocks=split.blocks.data_ptr(),
            ancestors=None if split.ancestors is None else split.ancestors.data_ptr(),
        )
        parts = (
            _LatentPart(size, FORMATS[format], codes.data_ptr(), scale.data_ptr())
            for size, format, codes, scale in zip(
                sizes, (scheme.value_format, scheme.key_format), (latents, keys), scales[::-1], strict=True
            )
        )
        return _LatentCall(attention, queries.shape[-1], keys.shape[1], *parts)


def _expands(heads: LatentProducts, group: AttentionGroup, rotated: int) -> bool:
    num_tokens = group.rows.stop - group.rows.start
    return group.num_sequences == 1 and heads.expands(num_tokens, group.num_keys, rotated)


def _lay_out(batch: Batch, expanded: tuple[int, ...]) -> _Split:
    """Puts the rows of all other groups side by side."""
    groups, rows, start = [], [torch.empty(0, dtype=torch.int64)], 0
    for group in (group for index, group in enumerate(batch.groups) if index not in expanded):
        rows.append(torch.arange(group.rows.start, group.rows.stop))
        groups.append(replace(group, rows=slice(start, start + len(rows[-1]))))
        start += len(rows[-1])
    blocks = torch.cat([rows[0], *(group.blocks for group in groups)])
    spans = torch.tensor(spans_of(groups), dtype=torch.int64)
    return _Split(expanded, torch.cat(rows), spans, blocks, ancestors_of(groups))


def latents_unsupported_reason(model: Model, memory: MemoryPlan) -> str:
    """Why latents of a model cannot be read; "" when they can."""
    device, dtype, scheme = model.device, model.dtype, memory.kv_cache
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"takes bfloat16 on CPUs, not {str(dtype).removeprefix('torch.')} on {device.type}"
    if library() is None:
        return absence()
    widest = max(mixer.latent.width for mixer in model.config.spec.attentions if mixer.latent is not None)
    if widest > LONGEST:
        return f"takes latents and rotated keys of {LONGEST} channels at most, not {widest}"
    return "reads no exact tokens next to latents" if scheme.sinks or scheme.residual_length else ""


def make_pages(model: Model, memory: MemoryPlan) -> KVPages:
    """Pages of the compiled attention of a model."""
    return kv_pages.make_pages(model, memory) if model.scores.latents else make_head_pages(model, memory)
