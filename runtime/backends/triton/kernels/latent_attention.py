"""Latent attention (arXiv:2405.04434, section 2.1) over pages, absorbed: all heads look at one latent and one rotated
key of a token. A latent is read once, as key and as value."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.attention import HeadPages
from runtime.backends.triton.fused_linear import QuantizedInput
from runtime.backends.triton.kernels.attention_tiles import (
    FORMS,
    INT8,
    LOG2_E,
    PLAIN,
    load_numbers,
    load_scales,
    load_tile,
    no_sums,
    online_softmax_update,
    reaches,
    split_span,
    store_tile,
    tree_rows,
)
from runtime.backends.triton.kernels.common import multiply
from runtime.backends.triton.kernels.split_join import join
from runtime.backends.triton.kernels.tile_list import TileList
from runtime.backends.triton.launcher import Launcher
from runtime.core.batch import RaggedRows


@triton.jit
def load_rows(
    pages, place, inside, like, FORM: tl.constexpr, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Numbers `[T, WIDTH]` at `place [T]` of pages, and scale and offset `[T]` of each row."""
    codes_ptr, scales_ptr = pages
    pointers = codes_ptr + place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    numbers = load_numbers(pointers, inside[:, None], FORM, INTERPRETED, like)
    scale = inside.to(tl.float32)
    offset = scale
    if FORM != PLAIN:
        scale, offset = load_scales(scales_ptr, place, inside, FORM)
    return numbers, scale, offset


@triton.jit
def score_rows(query, query_sum, rows, FORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Products `[R, T]` of queries with what `load_rows` gives; `query_sum [R]` are the sums of their channels."""
    numbers, scale, offset = rows
    scores = multiply(query, tl.trans(numbers), tl.zeros((query.shape[0], numbers.shape[0]), tl.float32), INTERPRETED)
    if FORM != PLAIN:
        scores *= scale[None, :]
    if FORM == INT8:
        scores += query_sum[:, None] * offset[None, :]
    return scores


@Launcher
@triton.jit(  # what changes from step to step must not cause another build while a request waits
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["blocks_ptr", "positions_ptr", "ancestors_ptr"],
)
def latent_attention(
    absorbed_ptr, rotated_ptr, keys_ptr, key_scales_ptr, latents_ptr, latent_scales_ptr, items_ptr, blocks_ptr,
    positions_ptr, ancestors_ptr, out_ptr, part_ptr, weight_ptr,
    scale, tokens, rotated_stride, block_size, window,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, KEY_FORM: tl.constexpr, FORM: tl.constexpr,
    WINDOWED: tl.constexpr, TREE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention of the rows of an item of the work list, see `list_tiles`, over one split of its keys.

    Program (item). A row is a token and a head. Queries are `absorbed [HEADS, tokens, RANK]` for latents, and `rotated
    [tokens, HEADS, ...]`, `rotated_stride` apart, for rotated keys. Pages are `[blocks, block_size, RANK]` and
    `[blocks, block_size, ROTATED]`, scales `[blocks, block_size, 1 or 2]`. What a token sees, and TREE, are as in
    `paged_attention`; so is what is written, for heads of RANK channels.
    """
    tile, part, token, head, has_row = load_tile(items_ptr, tl.program_id(0), 0, HEADS, BLOCK_R)
    _, table, first, split, splits = tile
    position = tl.load(positions_ptr + token, mask=has_row, other=-1).to(tl.int32)
    place = head.to(tl.int64) * tokens + token
    absorbed_ptrs = absorbed_ptr + place[:, None] * RANK + tl.arange(0, RANK)[None, :]
    absorbed = tl.load(absorbed_ptrs, mask=has_row[:, None], other=0.0)
    rotated_ptrs = rotated_ptr + (token.to(tl.int64) * HEADS + head)[:, None] * rotated_stride
    rotated = tl.load(rotated_ptrs + tl.arange(0, ROTATED)[None, :], mask=has_row[:, None], other=0.0)
    absorbed_sum, rotated_sum = tl.sum(absorbed.to(tl.float32), 1), tl.sum(rotated.to(tl.float32), 1)
    scale *= LOG2_E
    length = tl.max(position, 0) + 1
    root, ancestors = 0, position
    if TREE:
        root, ancestors, length = tree_rows(position, ancestors_ptr, positions_ptr, token, first, has_row, 0)
    start, stop = split_span(position, length, 0, split, splits, window, WINDOWED, 0, BLOCK_T)
    table_ptr = blocks_ptr + table
    highest, weight, planes, offsets = no_sums(BLOCK_R, RANK, 1)
    sums = planes[0]
    for begin in tl.range(start, stop, BLOCK_T, num_stages=STAGES):
        key = begin + tl.arange(0, BLOCK_T)
        inside = key < stop
        slot = tl.load(table_ptr + key // block_size, mask=inside, other=0) * block_size + key % block_size
        like = absorbed.dtype
        latents = load_rows((latents_ptr, latent_scales_ptr), slot, inside, like, FORM, RANK, INTERPRETED)
        keys = load_rows((keys_ptr, key_scales_ptr), slot, inside, like, KEY_FORM, ROTATED, INTERPRETED)
        scores = score_rows(absorbed, absorbed_sum, latents, FORM, INTERPRETED)
        scores += score_rows(rotated, rotated_sum, keys, KEY_FORM, INTERPRETED)
        seen = reaches(key, position, root, ancestors, window, TREE, WINDOWED, 0)
        scores = tl.where(inside[None, :] & seen, scores * scale, float("-inf"))
        share, fade, highest, weight = online_softmax_update(scores, highest, weight)
        offsets *= fade
        if FORM == INT8:
            offsets += tl.sum(share * latents[2][None, :], 1)
        if FORM != PLAIN:
            share *= latents[1][None, :]
        share = share if INTERPRETED else share.to(like)
        sums = multiply(share, latents[0], sums * fade[:, None], INTERPRETED)
    found, out = (highest, weight, (sums,), offsets), (out_ptr, part_ptr, weight_ptr, None)
    store_tile(found, out, tile, part, token, head, has_row, HEADS, 1, RANK, INTERPRETED)


def latent_tile(block_rows: int, format: str) -> dict[str, int]:
    """Tokens of a tile, stages of the pipeline and warps of `latent_attention` for `block_rows` rows of a program.

    Args:
        format: of latents.
    """
    # What fits in registers next to sums of 512 channels, as `scripts/compile_kernels.py` found it. With these stages a
    # tile is read while the one before is computed: places follow from the block table, which is read before them.
    is_plain = format == "16bit"
    return {"BLOCK_T": 32 if block_rows > 16 or is_plain else 64, "STAGES": 5 if is_plain else 3, "num_warps": 8}


def attend_latents(
    absorbed: Tensor,
    rotated: Tensor,
    read: HeadPages,
    rows: RaggedRows,
    tiles: TileList,
    block_rows: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Sums of latents `[T, heads, rank]` that the tokens of a step attend to.

    Args:
        absorbed: queries `[heads, T, rank]`, contiguous.
        rotated: the channels `[T, heads, R]` of contiguous queries that look at rotated keys.
        read: rotated keys as keys, latents as values, each with one head.
        tiles: work list for `block_rows` rows of a tile.
        scale: factor on scores.
    """
    heads, tokens, rank = absorbed.shape
    out, parts = absorbed.new_empty(tokens, heads, rank), tiles.room(absorbed, heads, rank)
    latent_attention[(len(tiles.items),)](
        absorbed, rotated, read.pages[0], read.scales[0], read.pages[1], read.scales[1], tiles.items, rows.blocks,
        rows.positions, rows.positions if rows.ancestors is None else rows.ancestors, out, *parts,
        scale, tokens, rotated.stride(1), read.pages[0].shape[1], window or 0,
        HEADS=heads, RANK=rank, ROTATED=rotated.shape[-1], KEY_FORM=FORMS[read.formats[0]],
        FORM=FORMS[read.formats[1]], WINDOWED=window is not None, TREE=rows.ancestors is not None,
        BLOCK_R=block_rows, **latent_tile(block_rows, read.formats[1]), INTERPRETED=triton.knobs.runtime.interpret,
    )  # fmt: skip
    if tiles.most_splits > 1:
        join(*parts, tiles, None, QuantizedInput(out.flatten(1)))
    return out
