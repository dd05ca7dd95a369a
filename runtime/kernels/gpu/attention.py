"""Attention over pages for decode, verification of drafts and chunks of prompts: one kernel, five forms of pages.

Codes are never dequantized: scores are scaled per key, probabilities per value, and offsets are added as one number
for each row. The context is cut into splits with a grid that does not depend on lengths; an empty split counts nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.planes import multiply

PLAIN, FP8, INT8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Forms of keys and of values."""


@triton.jit
def from_fp8(codes, INTERPRETED: tl.constexpr, like):
    """Bytes of e4m3 as numbers, exactly: their bits moved into a float32, whose exponent is then put right. Works on
    GPUs without 8-bit floats."""
    bits = (codes.to(tl.int32) & 0x80) << 24 | (codes.to(tl.int32) & 0x7F) << 20
    numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return numbers if INTERPRETED else numbers.to(like)


@triton.jit
def load_codes(pointer, inside, FORM: tl.constexpr, INTERPRETED: tl.constexpr, like):
    """Numbers that `pointer` points to: stored floats, or codes as floats; not for 4 bits."""
    raw = tl.load(pointer, mask=inside, other=0)
    if FORM == FP8:
        return from_fp8(raw, INTERPRETED, like)
    elif FORM == INT8:
        return raw.to(tl.float32 if INTERPRETED else like)
    else:
        return raw


@triton.jit
def paged_attention(
    query_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, blocks_ptr, positions_ptr, part_ptr, weight_ptr,
    scale, query_stride, blocks_stride, block_size, tokens_each, rows_each, splits, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention of `tokens_each` tokens of every sequence over one split of its context.

    Program (sequence * row blocks + row block, kv head, split). A row is a token and one of the query heads that share
    the kv head; `rows_each` are those of a sequence. Pages are `[blocks, block_size, KV_HEADS, D]`, codes of 4 bits
    `[..., D / 2]` with dimensions d and d + D / 2 in a byte; scales `[blocks, block_size, KV_HEADS, 1 or 2]`: scale and
    offset. A key is seen up to the token's position, and from `position - window + 1` on. Writes the normalized output
    `part [tokens, HEADS, splits, D]` float32 and the logarithm to base 2 of its weight `[tokens, HEADS, splits]`.
    """
    SHARED: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    KEY_META: tl.constexpr = 1 if KEY_FORM == FP8 else 2
    VALUE_META: tl.constexpr = 1 if VALUE_FORM == FP8 else 2
    row_blocks = tl.cdiv(rows_each, BLOCK_R)
    sequence, head, split = tl.program_id(0) // row_blocks, tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    has_row = row < rows_each
    token = sequence * tokens_each + row // SHARED
    query_head = head * SHARED + row % SHARED
    d, half, t = tl.arange(0, HEAD_DIM), tl.arange(0, HALF), tl.arange(0, BLOCK_T)
    position = tl.load(positions_ptr + token, mask=has_row, other=-1)
    query_ptrs = query_ptr + token.to(tl.int64)[:, None] * query_stride + query_head[:, None] * HEAD_DIM
    if KEY_FORM == INT4:
        query_low = tl.load(query_ptrs + half[None, :], mask=has_row[:, None], other=0.0)
        query_high = tl.load(query_ptrs + HALF + half[None, :], mask=has_row[:, None], other=0.0)
        query_sum = tl.sum(query_low.to(tl.float32), 1) + tl.sum(query_high.to(tl.float32), 1)
        like = query_low.dtype
    else:
        query = tl.load(query_ptrs + d[None, :], mask=has_row[:, None], other=0.0)
        query_sum = tl.sum(query.to(tl.float32), 1)
        like = query.dtype
    length = tl.max(position, 0) + 1
    first = 0
    if WINDOWED:
        lowest = tl.min(tl.where(has_row, position, 2147483647), 0) - window + 1
        first = tl.maximum(lowest, 0) // BLOCK_T * BLOCK_T
    per_split = tl.cdiv(tl.cdiv(length - first, splits), BLOCK_T) * BLOCK_T
    start = first + split * per_split
    stop = tl.minimum(start + per_split, length)
    highest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_R,), tl.float32)
    offsets = tl.zeros((BLOCK_R,), tl.float32)
    if VALUE_FORM == INT4:
        out_low = tl.zeros((BLOCK_R, HALF), tl.float32)
        out_high = tl.zeros((BLOCK_R, HALF), tl.float32)
    else:
        out = tl.zeros((BLOCK_R, HEAD_DIM), tl.float32)
    for begin in tl.range(start, stop, BLOCK_T, num_stages=STAGES):
        key = begin + t
        inside = key < stop
        block = tl.load(blocks_ptr + sequence * blocks_stride + key // block_size, mask=inside, other=0)
        place = (block * block_size + key % block_size) * KV_HEADS + head
        if KEY_FORM == INT4:
            codes = tl.load(keys_ptr + place[None, :] * HALF + half[:, None], mask=inside[None, :], other=0)
            low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
            scores = multiply(query_low, low.to(like), tl.zeros((BLOCK_R, BLOCK_T), tl.float32), INTERPRETED)
            scores = multiply(query_high, high.to(like), scores, INTERPRETED)
        else:
            numbers = load_codes(
                keys_ptr + place[None, :] * HEAD_DIM + d[:, None], inside[None, :], KEY_FORM, INTERPRETED, like
            )
            scores = multiply(query, numbers, tl.zeros((BLOCK_R, BLOCK_T), tl.float32), INTERPRETED)
        if KEY_FORM != PLAIN:
            key_scale = tl.load(key_scales_ptr + place * KEY_META, mask=inside, other=0.0).to(tl.float32)
            scores = scores * key_scale[None, :]
            if KEY_FORM != FP8:
                key_offset = tl.load(key_scales_ptr + place * KEY_META + 1, mask=inside, other=0.0).to(tl.float32)
                scores += query_sum[:, None] * key_offset[None, :]
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * (scale * 1.4426950408889634), float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        fade = tl.exp2(highest - base)
        share = tl.exp2(scores - base[:, None])
        weight = weight * fade + tl.sum(share, 1)
        highest = peak
        if VALUE_FORM != PLAIN:
            value_scale = tl.load(value_scales_ptr + place * VALUE_META, mask=inside, other=0.0).to(tl.float32)
            if VALUE_FORM != FP8:
                value_offset = tl.load(value_scales_ptr + place * VALUE_META + 1, mask=inside, other=0.0).to(tl.float32)
                offsets = offsets * fade + tl.sum(share * value_offset[None, :], 1)
            share = share * value_scale[None, :]
        share = share if INTERPRETED else share.to(like)
        if VALUE_FORM == INT4:
            codes = tl.load(values_ptr + place[:, None] * HALF + half[None, :], mask=inside[:, None], other=0)
            low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
            out_low = multiply(share, low.to(like), out_low * fade[:, None], INTERPRETED)
            out_high = multiply(share, high.to(like), out_high * fade[:, None], INTERPRETED)
        else:
            numbers = load_codes(
                values_ptr + place[:, None] * HEAD_DIM + d[None, :], inside[:, None], VALUE_FORM, INTERPRETED, like
            )
            out = multiply(share, numbers, out * fade[:, None], INTERPRETED)
    total = tl.where(weight > 0, weight, 1.0)
    place = (token.to(tl.int64) * HEADS + query_head) * splits + split
    if VALUE_FORM == INT4:
        out_ptrs = part_ptr + place[:, None] * HEAD_DIM + half[None, :]
        tl.store(out_ptrs, (out_low + offsets[:, None]) / total[:, None], mask=has_row[:, None])
        tl.store(out_ptrs + HALF, (out_high + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    else:
        out_ptrs = part_ptr + place[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_ptrs, (out + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    tl.store(weight_ptr + place, tl.where(weight > 0, highest + tl.log2(total), float("-inf")), mask=has_row)


@triton.jit
def join_splits(part_ptr, weight_ptr, out_ptr, splits, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """`out [rows, D]` in its own dtype: the splits of a row by their weights. SPLITS is a power of two, at least
    `splits`. Every row sees its own key, so some split is not empty."""
    row, split, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    is_split = split < splits
    weight = tl.load(weight_ptr + row * splits + split, mask=is_split, other=float("-inf"))
    share = tl.exp2(weight - tl.max(weight, 0))
    used = is_split & (weight > float("-inf"))
    part = tl.load(part_ptr + (row * splits + split)[:, None] * HEAD_DIM + d[None, :], mask=used[:, None], other=0.0)
    joined = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out_ptr + row * HEAD_DIM + d, joined.to(out_ptr.dtype.element_ty))
