"""Queries with one tile of keys and values in pages: products of codes, which are never dequantized. Scores are scaled
per key, probabilities per value, and offsets are added as one number for each row."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.planes import multiply
from runtime.kernels.gpu.rounding import from_fp8

PLAIN, FP8, INT8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Forms of keys and of values."""


@triton.jit
def load_numbers(pointer, inside, FORM: tl.constexpr, INTERPRETED: tl.constexpr, like):
    """Numbers that `pointer` points to: stored floats, or codes as floats; not for 4 bits."""
    raw = tl.load(pointer, mask=inside, other=0)
    if FORM == FP8:
        return from_fp8(raw, INTERPRETED, like)
    elif FORM == INT8:
        return raw.to(tl.float32 if INTERPRETED else like)
    else:
        return raw


@triton.jit
def load_query(pointers, is_row, HEAD_DIM: tl.constexpr, HALVES: tl.constexpr):
    """Rows of queries `[R, D]`, or their two halves `[R, D / 2]`, and the sum of each row."""
    HALF: tl.constexpr = HEAD_DIM // 2
    if HALVES:
        low = tl.load(pointers + tl.arange(0, HALF)[None, :], mask=is_row[:, None], other=0.0)
        high = tl.load(pointers + HALF + tl.arange(0, HALF)[None, :], mask=is_row[:, None], other=0.0)
        return low, high, tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
    else:
        whole = tl.load(pointers + tl.arange(0, HEAD_DIM)[None, :], mask=is_row[:, None], other=0.0)
        return whole, whole, tl.sum(whole.to(tl.float32), 1)


@triton.jit
def score_keys(
    low, high, query_sum, scale, keys_ptr, scales_ptr, place, inside,
    FORM: tl.constexpr, HALVES: tl.constexpr, HEAD_DIM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Products `[R, T]` of queries, as `load_query` gives them, with the keys at `place [T]`, times `scale`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    META: tl.constexpr = 1 if FORM == FP8 else 2
    half, is_key = tl.arange(0, HALF), inside[None, :]
    scores = tl.zeros((low.shape[0], place.shape[0]), tl.float32)
    if FORM == INT4:
        codes = tl.load(keys_ptr + place[None, :] * HALF + half[:, None], mask=is_key, other=0)
        scores = multiply(low, (codes & 15).to(tl.float32).to(low.dtype), scores, INTERPRETED)
        scores = multiply(high, (codes >> 4).to(tl.float32).to(low.dtype), scores, INTERPRETED)
    elif HALVES:
        pointers = keys_ptr + place[None, :] * HEAD_DIM + half[:, None]
        scores = multiply(low, tl.load(pointers, mask=is_key, other=0), scores, INTERPRETED)
        scores = multiply(high, tl.load(pointers + HALF, mask=is_key, other=0), scores, INTERPRETED)
    else:
        pointers = keys_ptr + place[None, :] * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None]
        scores = multiply(low, load_numbers(pointers, is_key, FORM, INTERPRETED, low.dtype), scores, INTERPRETED)
    if FORM == PLAIN:
        return scores * scale
    else:
        scores = scores * (tl.load(scales_ptr + place * META, mask=inside, other=0.0).to(tl.float32) * scale)[None, :]
        if FORM != FP8:
            offset = tl.load(scales_ptr + place * META + 1, mask=inside, other=0.0).to(tl.float32) * scale
            scores += query_sum[:, None] * offset[None, :]
        return scores


@triton.jit
def weigh(scores, highest, weight):
    """Weights `[R, T]` of a tile from its scores, to base 2 and minus infinity where nothing is seen; by how much what
    was summed up before fades; and the new peaks and sums of weights of the rows."""
    peak = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    fade = tl.exp2(highest - base)
    share = tl.exp2(scores - base[:, None])
    return share, fade, peak, weight * fade + tl.sum(share, 1)


@triton.jit
def add_values(
    share, fade, low, high, offsets, values_ptr, scales_ptr, place, inside, like,
    FORM: tl.constexpr, HALVES: tl.constexpr, HEAD_DIM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums of values `[R, D]`, or their halves `[R, D / 2]`, and of offsets `[R]`: faded, and with a tile added."""
    HALF: tl.constexpr = HEAD_DIM // 2
    META: tl.constexpr = 1 if FORM == FP8 else 2
    half, is_key = tl.arange(0, HALF), inside[:, None]
    offsets = offsets * fade
    if FORM != PLAIN:
        scale = tl.load(scales_ptr + place * META, mask=inside, other=0.0).to(tl.float32)
        if FORM != FP8:
            offset = tl.load(scales_ptr + place * META + 1, mask=inside, other=0.0).to(tl.float32)
            offsets += tl.sum(share * offset[None, :], 1)
        share = share * scale[None, :]
    share = share if INTERPRETED else share.to(like)
    faded = fade[:, None]
    if FORM == INT4:
        codes = tl.load(values_ptr + place[:, None] * HALF + half[None, :], mask=is_key, other=0)
        low = multiply(share, (codes & 15).to(tl.float32).to(like), low * faded, INTERPRETED)
        high = multiply(share, (codes >> 4).to(tl.float32).to(like), high * faded, INTERPRETED)
    elif HALVES:
        pointers = values_ptr + place[:, None] * HEAD_DIM + half[None, :]
        low = multiply(share, tl.load(pointers, mask=is_key, other=0), low * faded, INTERPRETED)
        high = multiply(share, tl.load(pointers + HALF, mask=is_key, other=0), high * faded, INTERPRETED)
    else:
        pointers = values_ptr + place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        numbers = load_numbers(pointers, is_key, FORM, INTERPRETED, like)
        low = multiply(share, numbers, low * faded, INTERPRETED)
    return low, high, offsets


@triton.jit
def attend_tile(
    query_low, query_high, query_sum, highest, weight, low, high, offsets,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, place, inside, seen, scale,
    KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr, KEY_HALVES: tl.constexpr, HALVES: tl.constexpr,
    HEAD_DIM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The peaks, sums of weights, values and offsets of rows, with the keys at `place [T]` added that they see."""
    scores = score_keys(
        query_low, query_high, query_sum, scale, keys_ptr, key_scales_ptr, place, inside,
        KEY_FORM, KEY_HALVES, HEAD_DIM, INTERPRETED,
    )  # fmt: skip
    scores = tl.where(inside[None, :] & seen, scores, float("-inf"))
    share, fade, highest, weight = weigh(scores, highest, weight)
    low, high, offsets = add_values(
        share, fade, low, high, offsets, values_ptr, value_scales_ptr, place, inside, query_low.dtype,
        VALUE_FORM, HALVES, HEAD_DIM, INTERPRETED,
    )  # fmt: skip
    return highest, weight, low, high, offsets
