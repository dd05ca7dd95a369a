"""Latent attention (arXiv:2405.04434, section 2.1) over pages, absorbed: all heads look at one latent and one rotated
key of a token. A latent is read once, as key and as value."""

from __future__ import annotations

import torch
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
    no_sums,
    online_softmax_update,
    program_rows,
    reaches,
    split_span,
    store_rows,
)
from runtime.backends.triton.kernels.common import multiply
from runtime.backends.triton.kernels.split_join import join
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.sizes import cdiv


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
@triton.jit(  # what changes from step to step: other values must not cause another build while a request waits
    do_not_specialize=["tokens", "blocks_stride", "tokens_each", "rows_each", "splits"],
    do_not_specialize_on_alignment=["blocks_ptr", "positions_ptr", "ancestors_ptr"],
)
def latent_attention(
    absorbed_ptr, rotated_ptr, keys_ptr, key_scales_ptr, latents_ptr, latent_scales_ptr, blocks_ptr, positions_ptr,
    ancestors_ptr, part_ptr, weight_ptr,
    scale, tokens, rotated_stride, blocks_stride, block_size, tokens_each, rows_each, splits, window,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, KEY_FORM: tl.constexpr, FORM: tl.constexpr,
    WINDOWED: tl.constexpr, TREE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention of `tokens_each` tokens of every sequence over one split of its context.

    Program (sequence * row blocks + row block, split). A row is a token and a head. Queries are `absorbed [HEADS,
    tokens, RANK]` for latents, and `rotated [tokens, HEADS, ...]`, `rotated_stride` apart, for rotated keys. Pages are
    `[blocks, block_size, RANK]` and `[blocks, block_size, ROTATED]`, scales `[blocks, block_size, 1 or 2]`. What a
    token sees, and TREE, are as in `paged_attention`.

    Writes `part [HEADS, tokens, splits, RANK]` and `weight [HEADS, tokens, splits]` as `store_rows` says.
    """
    split = tl.program_id(1)
    sequence, token, head, has_row = program_rows(rows_each, tokens_each, 0, HEADS, BLOCK_R)
    position = tl.load(positions_ptr + token, mask=has_row, other=-1)
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
        root = tl.load(positions_ptr + sequence * tokens_each).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + token, mask=has_row, other=0)
        # Rows of padding behind a short draft have no ancestors, and their keys are not written.
        last = tl.max(tl.where(ancestors != 0, token - sequence * tokens_each + 1, 0), 0)
        length = tl.where(root < 0, 0, root + last)
    start, stop = split_span(position, length, 0, split, splits, window, WINDOWED, 0, BLOCK_T)
    table_ptr = blocks_ptr + sequence * blocks_stride
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
    found = highest, weight, (sums,), offsets
    store_rows(found, part_ptr, weight_ptr, place * splits + split, has_row, 1, RANK, INTERPRETED)


def latent_tile(block_rows: int) -> dict[str, int]:
    """Tokens of a tile, stages of the pipeline and warps of `latent_attention` for `block_rows` rows of a program."""
    # What fits in registers beside sums of 512 channels, as `scripts/compile_kernels.py` found it.
    return {"BLOCK_T": 32 if block_rows > 16 else 64, "STAGES": 2, "num_warps": 8}


def attend_latents(
    absorbed: Tensor,
    rotated: Tensor,
    read: HeadPages,
    blocks: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    block_rows: int,
    splits: int,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Sums of latents `[heads, B * n, rank]` that n tokens of each of B sequences attend to.

    Args:
        absorbed: queries `[heads, B * n, rank]`, contiguous.
        rotated: the channels `[B * n, heads, R]` of contiguous queries that look at rotated keys.
        read: rotated keys as keys, latents as values, each with one head.
        blocks, positions, block_rows, splits, ancestors: as of `paged_attention.attend`.
        scale: factor on scores.
    """
    heads, tokens, rank = absorbed.shape
    tokens_each, width = tokens // len(blocks), rotated.shape[-1]
    parts = absorbed.new_empty(heads, tokens, splits, rank, dtype=torch.float32)
    weights = absorbed.new_empty(heads, tokens, splits, dtype=torch.float32)
    grid = (len(blocks) * cdiv(tokens_each * heads, block_rows), splits)
    latent_attention[grid](
        absorbed, rotated, read.pages[0], read.scales[0], read.pages[1], read.scales[1], blocks, positions,
        positions if ancestors is None else ancestors, parts, weights,
        scale, tokens, rotated.stride(1), blocks.shape[1], read.pages[0].shape[1], tokens_each, tokens_each * heads,
        splits, window or 0,
        HEADS=heads, RANK=rank, ROTATED=width, KEY_FORM=FORMS[read.formats[0]], FORM=FORMS[read.formats[1]],
        WINDOWED=window is not None, TREE=ancestors is not None,
        BLOCK_R=block_rows, **latent_tile(block_rows), INTERPRETED=triton.knobs.runtime.interpret,
    )  # fmt: skip
    out = torch.empty_like(absorbed)
    join(parts.view(-1, 1, splits, rank), weights.view(-1, 1, splits), None, QuantizedInput(out.view(-1, rank)))
    return out
