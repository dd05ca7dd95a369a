"""Attention over pages of all tokens of a step in one launch, whether of decodes, drafts or prompts, in five forms of
pages.

Programs take their rows and keys from a work list; an empty split counts nothing. The first split also takes the tokens
in front: those that are kept exactly in addition to the pages, and those that a stream looks at with a second query.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.checkpoint.kv_cache import CODE_BITS
from runtime.backends.scores import PLAIN_LAYER, LayerScores
from runtime.backends.triton.attention import NO_SINK_TOKENS, HeadPages, SinkTokens
from runtime.backends.triton.device import HOPPER, has_capability
from runtime.backends.triton.fused_linear import ROWS_LAYOUT, SUMS, ActivationLayout, QuantizedInput
from runtime.backends.triton.kernels.attention_tiles import (
    FORMS,
    INT4,
    LOG2_E,
    PLAIN,
    attend_tile,
    load_query,
    load_tile,
    no_sums,
    reaches,
    split_span,
    store_tile,
    tree_rows,
)
from runtime.backends.triton.kernels.common import float8_instructions, unpack_instructions, wait_for_inputs
from runtime.backends.triton.kernels.split_join import join
from runtime.backends.triton.kernels.tile_list import TileList, tile_list
from runtime.backends.triton.launcher import BoundKernel, Launcher
from runtime.backends.triton.tiling import Tiling
from runtime.core.batch import RaggedRows


@triton.jit
def attend_exact(
    query, sums, keys_ptr, values_ptr, slot, exact, head, stop, position, window, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr,
    KEY_PLANES: tl.constexpr, PLANES: tl.constexpr, BLOCK_T: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums after adding the keys before `stop` of a slot of exact ones."""
    for begin in tl.range(0, stop, BLOCK_T, num_stages=1):
        key = begin + tl.arange(0, BLOCK_T)
        seen = reaches(key, position, 0, position, window, False, WINDOWED, CHUNK)
        sums = attend_tile(
            query, sums, (keys_ptr, keys_ptr, values_ptr, values_ptr),
            (slot * exact + key) * KV_HEADS + head, key < stop, seen, scale, CAP, PLAIN, PLAIN, KEY_PLANES, PLANES,
            HEAD_DIM, None, None, INTERPRETED,
        )  # fmt: skip
    return sums


@triton.jit
def load_blocks(table_ptr, begin, stop, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Blocks of the BLOCK_T keys from `begin`, a multiple of BLOCK_T, on; each once where they fill whole blocks."""
    key = begin + tl.arange(0, BLOCK_T)
    if BLOCK_T % BLOCK_SIZE == 0:
        key = begin + tl.arange(0, BLOCK_T // BLOCK_SIZE) * BLOCK_SIZE
    return tl.load(table_ptr + key // BLOCK_SIZE, mask=key < stop, other=0).to(tl.int32)


@triton.jit
def slots_in(blocks, begin, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Slots `[T]` of keys in what `load_blocks` gives for the same `begin`."""
    if BLOCK_T % BLOCK_SIZE == 0:
        return tl.reshape(blocks[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :], (BLOCK_T,))
    else:
        return blocks * BLOCK_SIZE + (begin + tl.arange(0, BLOCK_T)) % BLOCK_SIZE


@triton.jit
def attend_pages(
    query, sums, pages, table_ptr, head, start, stop, skipped, position, window, root, ancestors, scale,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, KEY_PLANES: tl.constexpr, PLANES: tl.constexpr, SKIPS: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr, KEY_PTX: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums after adding the keys from `start` to `stop` in the blocks of a table; SKIPS: without those before
    `skipped`."""
    for begin in tl.range(start, stop, BLOCK_T, num_stages=STAGES):
        key = begin + tl.arange(0, BLOCK_T)
        inside = key < stop
        if SKIPS:
            inside = inside & (key >= skipped)
        blocks = load_blocks(table_ptr, begin, stop, BLOCK_SIZE, BLOCK_T)
        place = slots_in(blocks, begin, BLOCK_SIZE, BLOCK_T) * KV_HEADS + head
        seen = reaches(key, position, root, ancestors, window, TREE, WINDOWED, CHUNK)
        sums = attend_tile(
            query, sums, pages, place, inside, seen, scale, CAP, KEY_FORM, VALUE_FORM, KEY_PLANES, PLANES,
            HEAD_DIM, KEY_PTX, PTX, INTERPRETED,
        )  # fmt: skip
    return sums


@Launcher
@triton.jit(  # what changes from step to step must not cause another build while a request waits
    do_not_specialize_on_alignment=["exact_slots_ptr", "blocks_ptr", "positions_ptr", "ancestors_ptr"],
)
def paged_attention(
    query_ptr, moved_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, exact_keys_ptr, exact_values_ptr,
    exact_slots_ptr, items_ptr, blocks_ptr, positions_ptr, ancestors_ptr, sink_ptr, out_ptr, part_ptr, weight_ptr,
    scale, query_stride, window, sinks, exact,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr,
    STREAMING: tl.constexpr, EXACT: tl.constexpr, TREE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr, KEY_PTX: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
    WAITS: tl.constexpr = False,
):  # fmt: skip
    """Attention of the rows of an item of the work list, see `list_tiles`, over one split of its keys.

    Program (item, kv head). A row is a token and one of the query heads that share the kv head. Pages are `[blocks,
    BLOCK_SIZE, KV_HEADS, D]`, codes of 4 bits `[..., D / 2]` with dimensions d and d + D / 2 in a byte; scales
    `[blocks, BLOCK_SIZE, KV_HEADS, 1 or 2]`: scale and offset. A key is seen up to the token's position, and from
    `position - window + 1` on. A token at position -1 is padding and sees nothing. CHUNK and CAP: see `LayerScores`; 0
    for none.

    TREE: tokens of a sequence may be a tree of drafts after its first token. Of the keys from that one's on, the k-th
    is seen where bit k of `ancestors [tokens]` is set; of those before, all that a window leaves. A token without
    ancestors sees what is before it.
    STREAMING: the first `sinks` keys are seen however far back, by a second query `moved`.
    EXACT: in the place of the first `exact` keys stand 16-bit ones `[slots, exact, KV_HEADS, D]`, at a slot for each
    sequence.

    Writes what `store_tile` says.
    """
    wait_for_inputs(WAITS)
    KEY_PLANES: tl.constexpr = 4 if KEY_FORM == INT4 else (1 if KEY_FORM == PLAIN else 2)
    PLANES: tl.constexpr = 4 if VALUE_FORM == INT4 else (1 if VALUE_FORM == PLAIN else 2)
    head = tl.program_id(1)
    tile, part, token, query_head, has_row = load_tile(items_ptr, tl.program_id(0), head, HEADS // KV_HEADS, BLOCK_R)
    sequence, table, first, split, splits = tile
    position = tl.load(positions_ptr + token, mask=has_row, other=-1).to(tl.int32)
    query_place = token.to(tl.int64)[:, None] * query_stride + query_head[:, None] * HEAD_DIM
    query = load_query(query_ptr + query_place, has_row, KEY_PLANES, HEAD_DIM)
    scale *= LOG2_E
    length = tl.max(position, 0) + 1
    root, ancestors = 0, position
    if TREE:
        root, ancestors, length = tree_rows(position, ancestors_ptr, positions_ptr, token, first, has_row, CHUNK)
    front = 0
    if STREAMING:
        front = sinks
    if EXACT:
        front = tl.maximum(front, exact)
    start, stop = split_span(position, length, front, split, splits, window, WINDOWED, CHUNK, BLOCK_T)
    table_ptr = blocks_ptr + table
    pages = keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr
    sums = no_sums(BLOCK_R, HEAD_DIM, PLANES)
    if STREAMING or EXACT:
        in_front = tl.where(split == 0, tl.minimum(front, length), 0)
        front_query = query
        if STREAMING:
            front_query = load_query(moved_ptr + query_place, has_row, KEY_PLANES, HEAD_DIM)
    if EXACT:
        sums = attend_exact(
            front_query, sums, exact_keys_ptr, exact_values_ptr,
            tl.load(exact_slots_ptr + sequence).to(tl.int32), exact, head, tl.minimum(in_front, exact), position,
            window, scale, KV_HEADS, HEAD_DIM, WINDOWED and not STREAMING, CHUNK, CAP, KEY_PLANES, PLANES, BLOCK_T,
            INTERPRETED,
        )  # fmt: skip
    if STREAMING:
        sums = attend_pages(
            front_query, sums, pages, table_ptr, head, 0, in_front, exact, position, window, root,
            ancestors, scale, KV_HEADS, BLOCK_SIZE, HEAD_DIM, KEY_FORM, VALUE_FORM, KEY_PLANES, PLANES, EXACT,
            False, CHUNK, CAP, TREE, BLOCK_T, 1, KEY_PTX, PTX, INTERPRETED,
        )  # fmt: skip
    sums = attend_pages(
        query, sums, pages, table_ptr, head, start, stop, front, position, window, root, ancestors, scale,
        KV_HEADS, BLOCK_SIZE, HEAD_DIM, KEY_FORM, VALUE_FORM, KEY_PLANES, PLANES, STREAMING or EXACT, WINDOWED, CHUNK,
        CAP, TREE, BLOCK_T, STAGES, KEY_PTX, PTX, INTERPRETED,
    )  # fmt: skip
    out = out_ptr, part_ptr, weight_ptr, sink_ptr
    store_tile(sums, out, tile, part, token, query_head, has_row, HEADS, PLANES, HEAD_DIM, INTERPRETED)


def attention_tile(
    head_dim: int,
    block_rows: int,
    formats: tuple[str, str],
    has_exact: bool = False,
    beside: bool = False,
    is_hopper: bool = True,
) -> dict[str, int]:
    """Keys of a tile, stages of the pipeline and warps of `paged_attention` for `block_rows` rows of a program.

    Args:
        beside: of a stream that also looks at exact tokens or a tree.
        is_hopper: on a GPU of compute capability 9.0 or newer.
    """
    # What fits in registers as `scripts/compile_kernels.py` found it: wide heads, and many rows that look at more than
    # pages, need more than four warps have.
    crowded = block_rows == 64 and has_exact
    heavy = head_dim > 128 or crowded or (beside and block_rows > 16 and head_dim > 32)
    # Four warps share the columns of a product only where those are more than its rows: a plane has few.
    planes = 16 // CODE_BITS.get(formats[1], 16)
    narrow = planes > 1 and head_dim // planes <= block_rows < 64
    few_keys = block_rows == 64 or head_dim > 256 or beside or (has_exact and head_dim in (64, 128))
    few_keys = few_keys or (narrow and head_dim * planes == 512)
    fewest_keys = crowded and not is_hopper  # larger tiles spill with the instructions of before Hopper
    # Registers leave room for three programs a processor: 4 bits are few to wait for, 128 keys of 8 bits too many.
    many_keys = planes > 2 and head_dim == 128 and block_rows == 16
    # Pages follow from the block table, so two stages are one tile ahead: with five, a tile is read while the one
    # before is computed; with three, only all of its reads are under way together.
    return {
        "BLOCK_T": 16 if fewest_keys else 32 if few_keys else 128 if many_keys else 64,
        "STAGES": 1 if crowded or (beside and head_dim > 128) else 5 if head_dim <= 128 else 3,
        "num_warps": 8 if heavy else 2 if narrow else 4,
    }


class PreparedAttention(NamedTuple):
    """Attention of a step in layers with the same heads, window and changes of scores.

    Attributes:
        grid: items of the work list, and kv heads.
        tokens: tensors that say where tokens and their keys stand.
        numbers: other arguments that stay the same.
        tiles: the work list.
        parts: results of splits `[n, heads, D]` and their weights `[n, heads]`, overwritten by every layer.
    """

    kernel: BoundKernel
    grid: tuple[int, int]
    tokens: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    tiles: TileList
    parts: tuple[Tensor, Tensor]

    def joined(self, form: ActivationLayout) -> ActivationLayout:
        """The form of the output that `__call__` can store, as close to `form` as possible."""
        return form if form.kind == SUMS and self.tiles.most_splits > 1 else ROWS_LAYOUT

    def __call__(
        self,
        query: Tensor,
        read: HeadPages,
        front: SinkTokens,
        sink_logits: Tensor | None,
        out: QuantizedInput,
        form: ActivationLayout,
    ) -> None:
        """Stores the attention of a layer as an input `[T, heads * D]` in a form, one of `joined`."""
        (keys, values), (key_scales, value_scales) = read.pages, read.scales
        pages = keys, key_scales, values, value_scales
        tensors = *front.queries, *pages, *front.exact_tensors, *self.tokens, *given(sink_logits)
        self.kernel(self.grid, query, *tensors, out.rows, *self.parts, *self.numbers)
        if self.tiles.most_splits > 1:
            join(*self.parts, self.tiles, sink_logits, out, form)


def prepare(
    query: Tensor,
    read: HeadPages,
    rows: RaggedRows,
    tiles: TileList,
    block_rows: int,
    window: int | None,
    front: SinkTokens,
    scores: LayerScores,
) -> PreparedAttention:
    """Prepares what `attend` launches, by the tensors of one of the layers."""
    _, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = read.pages[0].shape
    kernel = _bound(
        (heads, kv_heads, head_dim), block_size, read.formats, block_rows, query.dtype, window is not None,
        scores.chunk or 0, scores.softcap or 0.0, front.forms, rows.ancestors is not None,
        scores.sink_logits is not None, has_capability(query.device, HOPPER),
    )  # fmt: skip
    tokens = tiles.items, rows.blocks, rows.positions, *given(rows.ancestors)
    numbers = window or 0, front.sinks, front.num_exact
    return PreparedAttention(
        kernel, (len(tiles.items), kv_heads), tokens, numbers, tiles, tiles.room(query, heads, head_dim)
    )


def attend(
    query: Tensor,
    read: HeadPages,
    rows: RaggedRows,
    tiling: Tiling,
    window: int | None = None,
    front: SinkTokens = NO_SINK_TOKENS,
    scores: LayerScores = PLAIN_LAYER,
) -> Tensor:
    """Attention of the tokens of a step: rows `[T, heads * D]` in the dtype of the query.

    Args:
        query: `[T, heads, D]`, contiguous, in the basis of the keys.
        rows: of the T tokens.
        front: what is special about the first tokens.
        scores: of the layer.
    """
    out = QuantizedInput(query.new_empty(len(query), query.shape[1] * query.shape[2]))
    tiles = tile_list(rows, len(query), tiling)
    prepared = prepare(query, read, rows, tiles, tiling.rows, window, front, scores)
    prepared(query, read, front, scores.sink_logits, out, ROWS_LAYOUT)
    return out.rows


def given(tensor: Tensor | None) -> tuple[Tensor, ...]:
    """The arguments that an optional tensor is."""
    return () if tensor is None else (tensor,)


@cache
def _bound(
    shape: tuple[int, int, int],
    block_size: int,
    formats: tuple[str, str],
    block_rows: int,
    dtype: torch.dtype,
    is_windowed: bool,
    chunk: int,
    softcap: float,
    front: tuple[bool, bool],
    is_tree: bool,
    has_sinks: bool,
    is_hopper: bool,
) -> BoundKernel:
    """The kernel for heads, kv heads and their dimensions."""
    (heads, kv_heads, head_dim), (streaming, has_exact) = shape, front
    unused = {
        "moved_ptr": streaming,
        **dict.fromkeys(("exact_keys_ptr", "exact_values_ptr", "exact_slots_ptr"), has_exact),
        "ancestors_ptr": is_tree,
        "sink_ptr": has_sinks,
    }
    key_form, value_form = (FORMS[name] for name in formats)
    key_unpacking, unpacking = (unpacking_of(name, dtype) for name in formats)
    return paged_attention.bind(
        **{name: None for name, is_used in unused.items() if not is_used}, scale=head_dim**-0.5,
        query_stride=heads * head_dim, HEADS=heads, KV_HEADS=kv_heads, BLOCK_SIZE=block_size, HEAD_DIM=head_dim,
        KEY_FORM=key_form, VALUE_FORM=value_form, WINDOWED=is_windowed, CHUNK=chunk, CAP=softcap, STREAMING=streaming,
        EXACT=has_exact, TREE=is_tree, BLOCK_R=block_rows, KEY_PTX=key_unpacking, PTX=unpacking,
        **attention_tile(
            head_dim, block_rows, formats, has_exact, streaming and (has_exact or is_tree), is_hopper
        ),
        INTERPRETED=triton.knobs.runtime.interpret,
    )  # fmt: skip


def unpacking_of(format: str, dtype: torch.dtype) -> tuple[str, ...] | None:
    """PTX that unpacks codes of a format; None where there is nothing to unpack."""
    if format == "fp8":
        return float8_instructions(dtype == torch.bfloat16)
    return unpack_instructions(CODE_BITS[format], dtype == torch.bfloat16) if format in CODE_BITS else None
