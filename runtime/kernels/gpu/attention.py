"""Attention over pages for decode, verification of drafts and chunks of prompts: one kernel, five forms of pages.

The context is cut into splits with a grid that does not depend on lengths; an empty split counts nothing. The first
split also takes the tokens in front: those that are kept exactly beside the pages, and those that a stream looks at
with a second query.

What a program has summed up so far is `highest [R]` (peak of the scores), `weight [R]`, `low` and `high` (values, see
`add_values`) and `offsets [R]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.page_tiles import INT4, PLAIN, attend_tile, load_query


@triton.jit
def program_rows(rows_each, tokens_each, head, SHARED: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sequence of a program, and of its rows: tokens `[R]`, query heads `[R]`, and whether there are such."""
    row_blocks = tl.cdiv(rows_each, BLOCK_R)
    sequence = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    return sequence, sequence * tokens_each + row // SHARED, head * SHARED + row % SHARED, row < rows_each


@triton.jit
def reaches(key, position, root, ancestors, window, TREE: tl.constexpr, WINDOWED: tl.constexpr):
    """bool `[R, T]`: whether rows at `position [R]` look at `key [T]`. In a tree by the bits of `ancestors [R]` from
    key `root` on."""
    if TREE:
        member = tl.minimum(tl.maximum(key - root, 0), 63)
        seen = (key < root)[None, :] | ((ancestors[:, None] >> member[None, :]) & 1 == 1)
    else:
        seen = key[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (key[None, :] > position[:, None] - window)
    return seen


@triton.jit
def split_span(position, length, front, split, splits, window, WINDOWED: tl.constexpr, BLOCK_T: tl.constexpr):
    """The keys from `start` to `stop` that a split looks at: its share, in whole tiles, of those that some row sees
    behind the `front`."""
    first = front
    if WINDOWED:
        first = tl.maximum(tl.min(tl.where(position < 0, 2147483647, position), 0) - window + 1, first)
    first = first // BLOCK_T * BLOCK_T
    per_split = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), splits), BLOCK_T) * BLOCK_T
    start = first + split * per_split
    return start, tl.minimum(start + per_split, length)


@triton.jit
def attend_exact(
    query_low, query_high, query_sum, highest, weight, low, high, offsets,
    keys_ptr, values_ptr, slot, exact, head, stop, position, window, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOWED: tl.constexpr, KEY_HALVES: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_T: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What is summed up, with the keys before `stop` of a slot of exact ones."""
    for begin in tl.range(0, stop, BLOCK_T, num_stages=1):
        key = begin + tl.arange(0, BLOCK_T)
        seen = reaches(key, position, 0, position, window, False, WINDOWED)
        highest, weight, low, high, offsets = attend_tile(
            query_low, query_high, query_sum, highest, weight, low, high, offsets,
            keys_ptr, keys_ptr, values_ptr, values_ptr, (slot * exact + key) * KV_HEADS + head, key < stop, seen, scale,
            PLAIN, PLAIN, KEY_HALVES, HALVES, HEAD_DIM, INTERPRETED,
        )  # fmt: skip
    return highest, weight, low, high, offsets


@triton.jit
def attend_pages(
    query_low, query_high, query_sum, highest, weight, low, high, offsets,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, block_size, head,
    start, stop, skipped, position, window, root, ancestors, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr,
    SKIPS: tl.constexpr, WINDOWED: tl.constexpr, TREE: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What is summed up, with the keys from `start` to `stop` in the blocks of a table; SKIPS: but for those before
    `skipped`."""
    for begin in tl.range(start, stop, BLOCK_T, num_stages=STAGES):
        key = begin + tl.arange(0, BLOCK_T)
        inside = key < stop
        if SKIPS:
            inside = inside & (key >= skipped)
        block = tl.load(table_ptr + key // block_size, mask=inside, other=0)
        seen = reaches(key, position, root, ancestors, window, TREE, WINDOWED)
        highest, weight, low, high, offsets = attend_tile(
            query_low, query_high, query_sum, highest, weight, low, high, offsets,
            keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
            (block * block_size + key % block_size) * KV_HEADS + head, inside, seen, scale,
            KEY_FORM, VALUE_FORM, KEY_FORM == INT4, VALUE_FORM == INT4, HEAD_DIM, INTERPRETED,
        )  # fmt: skip
    return highest, weight, low, high, offsets


@triton.jit
def store_rows(
    highest, weight, low, high, offsets, part_ptr, weight_ptr, place, has_row,
    HALVES: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Stores what is summed up, divided by its weight, at `place [R]` of `part [..., D]`, and the logarithm to base 2
    of that weight: zeros and minus infinity where nothing was seen."""
    OUT: tl.constexpr = HEAD_DIM // 2 if HALVES else HEAD_DIM
    total = tl.where(weight > 0, weight, 1.0)
    out_ptrs = part_ptr + place[:, None] * HEAD_DIM + tl.arange(0, OUT)[None, :]
    tl.store(out_ptrs, (low + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    if HALVES:
        tl.store(out_ptrs + OUT, (high + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    tl.store(weight_ptr + place, tl.where(weight > 0, highest + tl.log2(total), float("-inf")), mask=has_row)


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
    KEY_HALVES: tl.constexpr = KEY_FORM == INT4
    HALVES: tl.constexpr = VALUE_FORM == INT4
    head, split = tl.program_id(1), tl.program_id(2)
    sequence, token, query_head, has_row = program_rows(rows_each, tokens_each, head, HEADS // KV_HEADS, BLOCK_R)
    position = tl.load(positions_ptr + token, mask=has_row, other=-1)
    if STREAMING and (EXACT or TREE) and BLOCK_R < 64:
        position = position.to(tl.int32)  # saves the registers that these forms lack
    query_place = token.to(tl.int64)[:, None] * query_stride + query_head[:, None] * HEAD_DIM
    query_low, query_high, query_sum = load_query(query_ptr + query_place, has_row, HEAD_DIM, KEY_HALVES)
    scale *= 1.4426950408889634
    length = tl.max(position, 0) + 1
    root, ancestors = 0, position
    if TREE:
        root = tl.load(positions_ptr + sequence * tokens_each).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + token, mask=has_row, other=0)
        length = tl.where(root < 0, 0, root + tokens_each)
    front = 0
    if STREAMING:
        front = sinks
    if EXACT:
        front = tl.maximum(front, exact)
    start, stop = split_span(position, length, front, split, splits, window, WINDOWED, BLOCK_T)
    table_ptr = blocks_ptr + sequence * blocks_stride
    highest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_R,), tl.float32)
    offsets = tl.zeros((BLOCK_R,), tl.float32)
    low = tl.zeros((BLOCK_R, HEAD_DIM // 2 if HALVES else HEAD_DIM), tl.float32)
    high = tl.zeros((BLOCK_R, HEAD_DIM // 2 if HALVES else 1), tl.float32)
    if STREAMING or EXACT:
        in_front = tl.where(split == 0, tl.minimum(front, length), 0)
        front_low, front_high, front_sum = query_low, query_high, query_sum
        if STREAMING:
            front_low, front_high, front_sum = load_query(moved_ptr + query_place, has_row, HEAD_DIM, KEY_HALVES)
    if EXACT:
        highest, weight, low, high, offsets = attend_exact(
            front_low, front_high, front_sum, highest, weight, low, high, offsets,
            exact_keys_ptr, exact_values_ptr, tl.load(exact_slots_ptr + sequence), exact, head,
            tl.minimum(in_front, exact), position, window, scale,
            KV_HEADS, HEAD_DIM, WINDOWED and not STREAMING, KEY_HALVES, HALVES, BLOCK_T, INTERPRETED,
        )  # fmt: skip
    if STREAMING:
        highest, weight, low, high, offsets = attend_pages(
            front_low, front_high, front_sum, highest, weight, low, high, offsets,
            keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, block_size, head,
            0, in_front, exact, position, window, root, ancestors, scale,
            KV_HEADS, HEAD_DIM, KEY_FORM, VALUE_FORM, EXACT, False, TREE, BLOCK_T, 1, INTERPRETED,
        )  # fmt: skip
    highest, weight, low, high, offsets = attend_pages(
        query_low, query_high, query_sum, highest, weight, low, high, offsets,
        keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, block_size, head,
        start, stop, front, position, window, root, ancestors, scale,
        KV_HEADS, HEAD_DIM, KEY_FORM, VALUE_FORM, STREAMING or EXACT, WINDOWED, TREE, BLOCK_T, STAGES, INTERPRETED,
    )  # fmt: skip
    place = (token.to(tl.int64) * HEADS + query_head) * splits + split
    store_rows(highest, weight, low, high, offsets, part_ptr, weight_ptr, place, has_row, HALVES, HEAD_DIM)


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
