"""Attention over pages for decode, verification of drafts and chunks of prompts: one kernel, five forms of pages.

Codes are never dequantized: scores are scaled per key, probabilities per value, and offsets are added as one number
for each row. The context is cut into splits with a grid that does not depend on lengths; an empty split counts nothing.
The first split also takes the tokens in front: those that are kept exactly beside the pages, and those that a stream
looks at with a second query.
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


@triton.jit
def reaches(key, position, root, ancestors, TREE: tl.constexpr):
    """bool `[R, T]`: whether rows at `position [R]` may look at `key [T]`, as far as windows let them. In a tree by the
    bits of `ancestors [R]` from key `root` on."""
    if TREE:
        member = tl.minimum(tl.maximum(key - root, 0), 63)
        return (key < root)[None, :] | ((ancestors[:, None] >> member[None, :]) & 1 == 1)
    else:
        return key[None, :] <= position[:, None]


@triton.jit(  # what changes from step to step: other values must not be another build, made while somebody waits
    do_not_specialize=["blocks_stride", "tokens_each", "rows_each", "splits"],
    do_not_specialize_on_alignment=["exact_slots_ptr", "blocks_ptr", "positions_ptr", "ancestors_ptr"],
)
def paged_attention(
    query_ptr, moved_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, exact_keys_ptr, exact_values_ptr,
    exact_slots_ptr, blocks_ptr, positions_ptr, ancestors_ptr, part_ptr, weight_ptr,
    scale, query_stride, blocks_stride, block_size, tokens_each, rows_each, splits, window, sinks, exact,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, WINDOWED: tl.constexpr, STREAMING: tl.constexpr, EXACT: tl.constexpr, TREE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention of `tokens_each` tokens of every sequence over one split of its context.

    Program (sequence * row blocks + row block, kv head, split). A row is a token and one of the query heads that share
    the kv head; `rows_each` are those of a sequence. Pages are `[blocks, block_size, KV_HEADS, D]`, codes of 4 bits
    `[..., D / 2]` with dimensions d and d + D / 2 in a byte; scales `[blocks, block_size, KV_HEADS, 1 or 2]`: scale and
    offset. A key is seen up to the token's position, and from `position - window + 1` on. A token at position -1 is
    padding and sees nothing.

    TREE: tokens of a sequence are a tree of guesses behind its first token. Of the keys from that one's on, the k-th is
    seen where bit k of `ancestors [tokens]` is set; of those before, all that a window leaves.
    STREAMING: the first `sinks` keys are seen however far back, by a second query `moved`.
    EXACT: in the place of the first `exact` keys stand 16-bit ones `[slots, exact, KV_HEADS, D]`, at a slot for each
    sequence.

    Writes the normalized output `part [tokens, HEADS, splits, D]` float32 and the logarithm to base 2 of its weight
    `[tokens, HEADS, splits]`: zeros and minus infinity where nothing was seen.
    """
    SHARED: tl.constexpr = HEADS // KV_HEADS
    KEY_HALVES: tl.constexpr = KEY_FORM == INT4
    HALVES: tl.constexpr = VALUE_FORM == INT4
    OUT: tl.constexpr = HEAD_DIM // 2 if HALVES else HEAD_DIM
    row_blocks = tl.cdiv(rows_each, BLOCK_R)
    sequence, head, split = tl.program_id(0) // row_blocks, tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    has_row = row < rows_each
    token = sequence * tokens_each + row // SHARED
    query_head = head * SHARED + row % SHARED
    t = tl.arange(0, BLOCK_T)
    position = tl.load(positions_ptr + token, mask=has_row, other=-1)
    if STREAMING and (EXACT or TREE) and BLOCK_R < 64:
        position = position.to(tl.int32)  # saves the registers that these forms lack
    query_place = token.to(tl.int64)[:, None] * query_stride + query_head[:, None] * HEAD_DIM
    low, high, query_sum = load_query(query_ptr + query_place, has_row, HEAD_DIM, KEY_HALVES)
    scale *= 1.4426950408889634
    length = tl.max(position, 0) + 1
    root, ancestors = 0, position
    if TREE:
        root = tl.load(positions_ptr + sequence * tokens_each).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + token, mask=has_row, other=0)
        length = tl.where(root < 0, 0, root + tokens_each)
    first = 0
    if WINDOWED:
        first = tl.maximum(tl.min(tl.where(position < 0, 2147483647, position), 0) - window + 1, 0)
    front = 0
    if STREAMING:
        front = sinks
    if EXACT:
        front = tl.maximum(front, exact)
    first = tl.maximum(first, front) // BLOCK_T * BLOCK_T
    per_split = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), splits), BLOCK_T) * BLOCK_T
    start = first + split * per_split
    stop = tl.minimum(start + per_split, length)
    table_ptr = blocks_ptr + sequence * blocks_stride
    highest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_R,), tl.float32)
    offsets = tl.zeros((BLOCK_R,), tl.float32)
    out_low = tl.zeros((BLOCK_R, OUT), tl.float32)
    out_high = tl.zeros((BLOCK_R, OUT if HALVES else 1), tl.float32)
    if STREAMING or EXACT:
        in_front = tl.where(split == 0, tl.minimum(front, length), 0)
        front_low, front_high, front_sum = low, high, query_sum
        if STREAMING:
            front_low, front_high, front_sum = load_query(moved_ptr + query_place, has_row, HEAD_DIM, KEY_HALVES)
    if EXACT:
        slot = tl.load(exact_slots_ptr + sequence)
        for begin in tl.range(0, tl.minimum(in_front, exact), BLOCK_T, num_stages=1):
            key = begin + t
            seen = key[None, :] <= position[:, None]
            if WINDOWED and not STREAMING:
                seen = seen & (key[None, :] > position[:, None] - window)
            highest, weight, out_low, out_high, offsets = attend_tile(
                front_low, front_high, front_sum, highest, weight, out_low, out_high, offsets,
                exact_keys_ptr, exact_keys_ptr, exact_values_ptr, exact_values_ptr,
                (slot * exact + key) * KV_HEADS + head, key < tl.minimum(in_front, exact), seen, scale,
                PLAIN, PLAIN, KEY_HALVES, HALVES, HEAD_DIM, INTERPRETED,
            )  # fmt: skip
    if STREAMING:
        for begin in tl.range(0, in_front, BLOCK_T, num_stages=1):
            key = begin + t
            inside = key < in_front
            if EXACT:
                inside = inside & (key >= exact)
            block = tl.load(table_ptr + key // block_size, mask=inside, other=0)
            highest, weight, out_low, out_high, offsets = attend_tile(
                front_low, front_high, front_sum, highest, weight, out_low, out_high, offsets,
                keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
                (block * block_size + key % block_size) * KV_HEADS + head, inside,
                reaches(key, position, root, ancestors, TREE),
                scale, KEY_FORM, VALUE_FORM, KEY_HALVES, HALVES, HEAD_DIM, INTERPRETED,
            )  # fmt: skip
    for begin in tl.range(start, stop, BLOCK_T, num_stages=STAGES):
        key = begin + t
        inside = key < stop
        if STREAMING or EXACT:
            inside = inside & (key >= front)
        block = tl.load(table_ptr + key // block_size, mask=inside, other=0)
        seen = reaches(key, position, root, ancestors, TREE)
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        highest, weight, out_low, out_high, offsets = attend_tile(
            low, high, query_sum, highest, weight, out_low, out_high, offsets,
            keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
            (block * block_size + key % block_size) * KV_HEADS + head, inside, seen,
            scale, KEY_FORM, VALUE_FORM, KEY_HALVES, HALVES, HEAD_DIM, INTERPRETED,
        )  # fmt: skip
    total = tl.where(weight > 0, weight, 1.0)
    place = (token.to(tl.int64) * HEADS + query_head) * splits + split
    out_ptrs = part_ptr + place[:, None] * HEAD_DIM + tl.arange(0, OUT)[None, :]
    tl.store(out_ptrs, (out_low + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    if HALVES:
        tl.store(out_ptrs + OUT, (out_high + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    tl.store(weight_ptr + place, tl.where(weight > 0, highest + tl.log2(total), float("-inf")), mask=has_row)


@triton.jit
def join_splits(part_ptr, weight_ptr, out_ptr, splits, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """`out [rows, D]` in its own dtype: the splits of a row by their weights, zeros for a row that saw nothing. SPLITS
    is a power of two, at least `splits`."""
    row, split, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    weight = tl.load(weight_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    used = weight > float("-inf")
    peak = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(peak > float("-inf"), peak, 0.0))
    part = tl.load(part_ptr + (row * splits + split)[:, None] * HEAD_DIM + d[None, :], mask=used[:, None], other=0.0)
    total = tl.sum(share, 0)
    joined = tl.sum(part * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + d, joined.to(out_ptr.dtype.element_ty))
