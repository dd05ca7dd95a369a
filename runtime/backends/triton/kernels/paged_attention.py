"""Attention over pages for decode, verification of drafts and chunks of prompts: one kernel, five forms of pages.

The context is cut into splits with a grid that does not depend on lengths; an empty split counts nothing. The first
split also takes the tokens in front: those that are kept exactly beside the pages, and those that a stream looks at
with a second query.

Device functions pass tuples. A query is what `load_query` gives. `sums`, what a program has summed up so far, are
`highest [R]` (peak of the scores), `weight [R]`, `low` and `high` (values, see `add_values`) and `offsets [R]`. `pages`
are pointers to keys, their scales, values and their scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.span_attention import PLAIN_LAYER, LayerScores
from runtime.backends.triton.attention import NO_SINK_TOKENS, HeadPages, SinkTokens
from runtime.backends.triton.kernels.common import from_fp8, multiply

PLAIN, FP8, INT8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Forms of keys and of values."""
LOG2_E = tl.constexpr(1.4426950408889634)


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
    query, scale, keys_ptr, scales_ptr, place, inside,
    FORM: tl.constexpr, HALVES: tl.constexpr, HEAD_DIM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Products `[R, T]` of queries with the keys at `place [T]`, times `scale`."""
    low, high, query_sum = query
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
def soft_cap(scores, CAP: tl.constexpr):
    """Scores to base 2, bounded as `span_attention.soft_cap` bounds them: tanh x is 1 - 2 / (1 + e^2x)."""
    return (CAP * LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP))))


@triton.jit
def online_softmax_update(scores, highest, weight):
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
    query, sums, pages, place, inside, seen, scale, CAP: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, KEY_HALVES: tl.constexpr, HALVES: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The sums of rows, with the keys at `place [T]` added that they see."""
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr = pages
    highest, weight, low, high, offsets = sums
    scores = score_keys(
        query, scale, keys_ptr, key_scales_ptr, place, inside, KEY_FORM, KEY_HALVES, HEAD_DIM, INTERPRETED
    )
    if CAP > 0:
        scores = soft_cap(scores, CAP)
    scores = tl.where(inside[None, :] & seen, scores, float("-inf"))
    share, fade, highest, weight = online_softmax_update(scores, highest, weight)
    low, high, offsets = add_values(
        share, fade, low, high, offsets, values_ptr, value_scales_ptr, place, inside, query[0].dtype,
        VALUE_FORM, HALVES, HEAD_DIM, INTERPRETED,
    )  # fmt: skip
    return highest, weight, low, high, offsets


@triton.jit
def program_rows(rows_each, tokens_each, head, SHARED: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sequence of a program, and of its rows: tokens `[R]`, query heads `[R]`, and whether there are such."""
    row_blocks = tl.cdiv(rows_each, BLOCK_R)
    sequence = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    return sequence, sequence * tokens_each + row // SHARED, head * SHARED + row % SHARED, row < rows_each


@triton.jit
def reaches(
    key, position, root, ancestors, window, TREE: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """bool `[R, T]`: whether rows at `position [R]` look at `key [T]`. In a tree by the bits of `ancestors [R]` from
    key `root` on."""
    if TREE:
        member = tl.minimum(tl.maximum(key - root, 0), 63)
        seen = (key < root)[None, :] | ((ancestors[:, None] >> member[None, :]) & 1 == 1)
    else:
        seen = key[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (key[None, :] > position[:, None] - window)
    if CHUNK > 0:
        seen = seen & (key[None, :] >= (position // CHUNK * CHUNK)[:, None])
    return seen


@triton.jit
def split_span(
    position, length, front, split, splits, window, WINDOWED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """The keys from `start` to `stop` that a split looks at: its share, in whole tiles, of those that some row sees
    behind the `front`."""
    first = front
    if WINDOWED or CHUNK > 0:
        least = tl.min(tl.where(position < 0, 2147483647, position), 0)
    if WINDOWED:
        first = tl.maximum(least - window + 1, first)
    if CHUNK > 0:
        first = tl.maximum(least // CHUNK * CHUNK, first)
    first = first // BLOCK_T * BLOCK_T
    per_split = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), splits), BLOCK_T) * BLOCK_T
    start = first + split * per_split
    return start, tl.minimum(start + per_split, length)


@triton.jit
def no_sums(BLOCK_R: tl.constexpr, HEAD_DIM: tl.constexpr, HALVES: tl.constexpr):
    """Sums of rows that have seen nothing."""
    highest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_R,), tl.float32)
    offsets = tl.zeros((BLOCK_R,), tl.float32)
    low = tl.zeros((BLOCK_R, HEAD_DIM // 2 if HALVES else HEAD_DIM), tl.float32)
    high = tl.zeros((BLOCK_R, HEAD_DIM // 2 if HALVES else 1), tl.float32)
    return highest, weight, low, high, offsets


@triton.jit
def attend_exact(
    query, sums, keys_ptr, values_ptr, slot, exact, head, stop, position, window, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr,
    KEY_HALVES: tl.constexpr, HALVES: tl.constexpr, BLOCK_T: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums after adding the keys before `stop` of a slot of exact ones."""
    for begin in tl.range(0, stop, BLOCK_T, num_stages=1):
        key = begin + tl.arange(0, BLOCK_T)
        seen = reaches(key, position, 0, position, window, False, WINDOWED, CHUNK)
        sums = attend_tile(
            query, sums, (keys_ptr, keys_ptr, values_ptr, values_ptr), (slot * exact + key) * KV_HEADS + head,
            key < stop, seen, scale, CAP, PLAIN, PLAIN, KEY_HALVES, HALVES, HEAD_DIM, INTERPRETED,
        )  # fmt: skip
    return sums


@triton.jit
def attend_pages(
    query, sums, pages, table_ptr, block_size, head, start, stop, skipped, position, window, root, ancestors, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr,
    SKIPS: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr,
    BLOCK_T: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums after adding the keys from `start` to `stop` in the blocks of a table; SKIPS: without those before
    `skipped`."""
    for begin in tl.range(start, stop, BLOCK_T, num_stages=STAGES):
        key = begin + tl.arange(0, BLOCK_T)
        inside = key < stop
        if SKIPS:
            inside = inside & (key >= skipped)
        block = tl.load(table_ptr + key // block_size, mask=inside, other=0)
        seen = reaches(key, position, root, ancestors, window, TREE, WINDOWED, CHUNK)
        sums = attend_tile(
            query, sums, pages, (block * block_size + key % block_size) * KV_HEADS + head, inside, seen, scale, CAP,
            KEY_FORM, VALUE_FORM, KEY_FORM == INT4, VALUE_FORM == INT4, HEAD_DIM, INTERPRETED,
        )  # fmt: skip
    return sums


@triton.jit
def store_rows(sums, part_ptr, weight_ptr, place, has_row, HALVES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Stores what is summed up, divided by its weight, at `place [R]` of `part [..., D]`, and the logarithm to base 2
    of that weight: zeros and minus infinity where nothing was seen."""
    OUT: tl.constexpr = HEAD_DIM // 2 if HALVES else HEAD_DIM
    highest, weight, low, high, offsets = sums
    is_empty = weight == 0  # a weight that is not a number stays one
    total = tl.where(is_empty, 1.0, weight)
    out_ptrs = part_ptr + place[:, None] * HEAD_DIM + tl.arange(0, OUT)[None, :]
    tl.store(out_ptrs, (low + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    if HALVES:
        tl.store(out_ptrs + OUT, (high + offsets[:, None]) / total[:, None], mask=has_row[:, None])
    tl.store(weight_ptr + place, tl.where(is_empty, float("-inf"), highest + tl.log2(total)), mask=has_row)


@triton.jit(  # what changes from step to step: other values must not cause another build while a request waits
    do_not_specialize=["blocks_stride", "tokens_each", "rows_each", "splits"],
    do_not_specialize_on_alignment=["exact_slots_ptr", "blocks_ptr", "positions_ptr", "ancestors_ptr"],
)
def paged_attention(
    query_ptr, moved_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, exact_keys_ptr, exact_values_ptr,
    exact_slots_ptr, blocks_ptr, positions_ptr, ancestors_ptr, part_ptr, weight_ptr,
    scale, query_stride, blocks_stride, block_size, tokens_each, rows_each, splits, window, sinks, exact,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, STREAMING: tl.constexpr,
    EXACT: tl.constexpr, TREE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention of `tokens_each` tokens of every sequence over one split of its context.

    Program (sequence * row blocks + row block, kv head, split). A row is a token and one of the query heads that share
    the kv head; `rows_each` are those of a sequence. Pages are `[blocks, block_size, KV_HEADS, D]`, codes of 4 bits
    `[..., D / 2]` with dimensions d and d + D / 2 in a byte; scales `[blocks, block_size, KV_HEADS, 1 or 2]`: scale and
    offset. A key is seen up to the token's position, and from `position - window + 1` on. A token at position -1 is
    padding and sees nothing. CHUNK and CAP: see `LayerScores`; 0 for none.

    TREE: tokens of a sequence are a tree of drafts behind its first token. Of the keys from that one's on, the k-th is
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
    query = load_query(query_ptr + query_place, has_row, HEAD_DIM, KEY_HALVES)
    scale *= LOG2_E
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
    start, stop = split_span(position, length, front, split, splits, window, WINDOWED, CHUNK, BLOCK_T)
    table_ptr = blocks_ptr + sequence * blocks_stride
    pages = keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr
    sums = no_sums(BLOCK_R, HEAD_DIM, HALVES)
    if STREAMING or EXACT:
        in_front = tl.where(split == 0, tl.minimum(front, length), 0)
        front_query = query
        if STREAMING:
            front_query = load_query(moved_ptr + query_place, has_row, HEAD_DIM, KEY_HALVES)
    if EXACT:
        sums = attend_exact(
            front_query, sums, exact_keys_ptr, exact_values_ptr, tl.load(exact_slots_ptr + sequence), exact, head,
            tl.minimum(in_front, exact), position, window, scale,
            KV_HEADS, HEAD_DIM, WINDOWED and not STREAMING, CHUNK, CAP, KEY_HALVES, HALVES, BLOCK_T, INTERPRETED,
        )  # fmt: skip
    if STREAMING:
        sums = attend_pages(
            front_query, sums, pages, table_ptr, block_size, head, 0, in_front, exact, position, window, root,
            ancestors, scale, KV_HEADS, HEAD_DIM, KEY_FORM, VALUE_FORM, EXACT, False, CHUNK, CAP, TREE, BLOCK_T, 1,
            INTERPRETED,
        )  # fmt: skip
    sums = attend_pages(
        query, sums, pages, table_ptr, block_size, head, start, stop, front, position, window, root, ancestors, scale,
        KV_HEADS, HEAD_DIM, KEY_FORM, VALUE_FORM, STREAMING or EXACT, WINDOWED, CHUNK, CAP, TREE, BLOCK_T, STAGES,
        INTERPRETED,
    )  # fmt: skip
    place = (token.to(tl.int64) * HEADS + query_head) * splits + split
    store_rows(sums, part_ptr, weight_ptr, place, has_row, HALVES, HEAD_DIM)


@triton.jit
def join_splits(
    part_ptr, weight_ptr, sink_ptr, out_ptr, splits, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """`out [rows, D]` in its own dtype: the splits of a row by their weights, zeros for a row that saw nothing. SPLITS
    is a power of two, at least `splits`. Rows are tokens by HEADS, of which each has a logit at `sink_ptr`, if there is
    one, that counts in the sum of weights."""
    row, split, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    weight = tl.load(weight_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    used = weight > float("-inf")
    peak = tl.max(weight, 0)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + row % HEADS).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    share = tl.exp2(weight - base)
    part = tl.load(part_ptr + (row * splits + split)[:, None] * HEAD_DIM + d[None, :], mask=used[:, None], other=0.0)
    total = tl.sum(share, 0)
    if sink_ptr is not None:
        total += tl.exp2(sink - base)
    joined = tl.sum(part * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + d, joined.to(out_ptr.dtype.element_ty))


FORMS = {"16bit": 0, "fp8": 1, "int8": 2, "int4": 3}
"""Formats of keys and values by the numbers that the kernel takes."""


def attention_tile(head_dim: int, block_rows: int, has_exact: bool, beside: bool) -> dict[str, int]:
    """Keys of a tile, stages of the pipeline and warps of `paged_attention` for `block_rows` rows of a program;
    `beside`: of a stream that also looks at exact tokens or a tree."""
    # What fits in registers as `scripts/compile_kernels.py` found it: wide heads, and many rows that look at more than
    # pages, need more than four warps have.
    crowded = block_rows == 64 and has_exact
    heavy = head_dim > 128 or crowded or (beside and block_rows > 16 and head_dim > 32)
    few_keys = block_rows == 64 or head_dim > 256 or beside or (has_exact and head_dim in (64, 128))
    return {
        "BLOCK_T": 32 if few_keys else 64,
        "STAGES": 1 if crowded or (beside and head_dim > 128) else 2,
        "num_warps": 8 if heavy else 4,
    }


def attend(
    query: Tensor,
    read: HeadPages,
    blocks: Tensor,
    positions: Tensor,
    window: int | None,
    block_rows: int,
    splits: int,
    front: SinkTokens = NO_SINK_TOKENS,
    ancestors: Tensor | None = None,
    scores: LayerScores = PLAIN_LAYER,
) -> Tensor:
    """Attention `[B * n, heads, D]` of n tokens of each of B sequences, in the dtype of the query.

    Args:
        query: `[B * n, heads, D]`, contiguous, in the basis of the keys.
        blocks: int64 `[B, blocks each]`.
        positions: int64 `[B * n]`, of each token among the keys of its blocks; -1 is padding, whose result is zeros.
        block_rows: rows of one program, 16 to 64.
        splits: into which the context is cut.
        front: what is special about the first tokens.
        ancestors: int64 `[B * n]`, of tokens that are trees of draft tokens (`AttentionGroup`); None is none.
        scores: of the layer; for a tree, `ancestors` are those in the chunk of each token.
    """
    tokens, heads, head_dim = query.shape
    keys, values = read.pages
    _, block_size, kv_heads, _ = keys.shape
    tokens_each = tokens // len(blocks)
    rows_each = tokens_each * (heads // kv_heads)
    parts = query.new_empty(tokens, heads, splits, head_dim, dtype=torch.float32)
    weights = query.new_empty(tokens, heads, splits, dtype=torch.float32)
    exact = front.exact or (query, query)
    streaming, has_exact, tree = front.sinks > 0, front.exact is not None, ancestors is not None
    tile = attention_tile(head_dim, block_rows, has_exact, streaming and (has_exact or tree))
    grid = (len(blocks) * triton.cdiv(rows_each, block_rows), kv_heads, splits)
    paged_attention[grid](
        query, query if front.moved is None else front.moved, keys, read.scales[0], values, read.scales[1], *exact,
        blocks if front.slots is None else front.slots, blocks, positions,
        positions if ancestors is None else ancestors, parts, weights,
        head_dim**-0.5, heads * head_dim, blocks.shape[1], block_size, tokens_each, rows_each, splits, window or 0,
        front.sinks, exact[0].shape[1] if has_exact else 0,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, KEY_FORM=FORMS[read.formats[0]],
        VALUE_FORM=FORMS[read.formats[1]], WINDOWED=window is not None, CHUNK=scores.chunk or 0,
        CAP=scores.softcap or 0.0, STREAMING=streaming, EXACT=has_exact, TREE=tree,
        BLOCK_R=block_rows, **tile, INTERPRETED=triton.knobs.runtime.interpret,
    )  # fmt: skip
    out, sinks = torch.empty_like(query), scores.sink_logits
    join_splits[(tokens * heads,)](
        parts, weights, sinks, out, splits, HEADS=0 if sinks is None else heads, HEAD_DIM=head_dim,
        SPLITS=triton.next_power_of_2(splits), num_warps=8 if head_dim > 256 else 4,
    )  # fmt: skip
    return out
