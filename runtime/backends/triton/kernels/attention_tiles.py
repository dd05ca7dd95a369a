"""Tiles of attention: queries, keys and values as they are stored, scores, and what a program sums up.

Device functions pass tuples. A query and its sums are what `load_query` gives. `sums`, what a program has summed up so
far, are `highest [R]` (peak of the scores), `weight [R]`, `values` (see `add_values`) and `offsets [R]`. `pages` are
pointers to keys, their scales, values and their scales.

Codes of a head lie in 16-bit words: four of 4 bits or two of 8, one in each of as many planes. One `lop3` turns those
of a plane in two words into two floats; 8 bits take two to five instructions. Scores and values are computed plane by
plane. 16-bit numbers are one plane.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.backends.triton.kernels.common import code_offset, from_fp8, multiply, rounded, unpack
from runtime.backends.triton.kernels.tile_list import COLUMNS, FIRST, PART, ROW, ROWS, SEQUENCE, SPLIT, SPLITS, TABLE

PLAIN, FP8, INT8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Forms of keys and of values."""
LOG2_E = tl.constexpr(1.4426950408889634)

FORMS = {"16bit": 0, "fp8": 1, "int8": 2, "int4": 3}
"""Formats of keys and of values by the numbers that kernels take."""


@triton.jit
def load_numbers(pointer, inside, FORM: tl.constexpr, INTERPRETED: tl.constexpr, like):
    """Numbers that `pointer` points to: stored floats, or codes of 8 bits as floats."""
    raw = tl.load(pointer, mask=inside, other=0)
    if FORM == FP8:
        return from_fp8(raw, INTERPRETED, like)
    elif FORM == INT8:
        return raw.to(tl.float32 if INTERPRETED else like)
    else:
        return raw


@triton.jit
def load_query(pointers, is_row, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of queries in their planes `[R, LANES]`, a tuple, and the sum of each row."""
    planes = load_query_planes(pointers, is_row[:, None], PLANES, HEAD_DIM)
    total = tl.sum(planes[0].to(tl.float32), 1)
    for plane in tl.static_range(1, PLANES):
        total += tl.sum(planes[plane].to(tl.float32), 1)
    return planes, total


@triton.jit
def load_query_planes(pointers, row, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Planes `[R, LANES]` of queries, a tuple."""
    first = load_plane(pointers, row, 0, PLANES, HEAD_DIM)
    if PLANES == 1:
        return (first,)
    elif PLANES == 2:
        return first, load_plane(pointers, row, 1, PLANES, HEAD_DIM)
    else:
        return (
            first,
            load_plane(pointers, row, 1, PLANES, HEAD_DIM),
            load_plane(pointers, row, 2, PLANES, HEAD_DIM),
            load_plane(pointers, row, 3, PLANES, HEAD_DIM),
        )


@triton.jit
def plane_dims(plane: tl.constexpr, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Dimensions `[LANES]` in one plane of a head: all of them, or those whose codes are in this plane of the head's
    words. Word e has bytes 2 e and 2 e + 1, and byte d of 4-bit codes has dimensions d and d + D / 2."""
    LANES: tl.constexpr = 16 if HEAD_DIM // PLANES < 16 else HEAD_DIM // PLANES
    lane = tl.arange(0, LANES)
    if PLANES == 4:
        return lane * 2 + (plane // 2 + plane % 2 * (HEAD_DIM // 2))
    else:
        return lane * PLANES + plane


@triton.jit
def is_lane(PLANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """bool `[LANES]`: products take no fewer than 16 lanes, and small heads fill less."""
    LANES: tl.constexpr = 16 if HEAD_DIM // PLANES < 16 else HEAD_DIM // PLANES
    return tl.arange(0, LANES) < HEAD_DIM // PLANES


@triton.jit
def load_plane(pointers, inside, plane: tl.constexpr, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One plane `[., LANES]` of 16-bit heads."""
    is_number = inside if HEAD_DIM // PLANES >= 16 else inside & is_lane(PLANES, HEAD_DIM)[None, :]
    return tl.load(pointers + plane_dims(plane, PLANES, HEAD_DIM)[None, :], mask=is_number, other=0.0)


@triton.jit
def load_planes(pages_ptr, place, inside, FORM: tl.constexpr, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Sources of `numbers_in_plane` for the heads at `place [T]`: words `[T, LANES]` with a code of each plane, or
    pointers `[T, 1]` to the heads."""
    if FORM != PLAIN:
        WORDS: tl.constexpr = HEAD_DIM // PLANES
        is_word = inside[:, None] if WORDS >= 16 else inside[:, None] & is_lane(PLANES, HEAD_DIM)[None, :]
        words_ptr = pages_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + place.to(tl.int64)[:, None] * WORDS
        words = tl.load(words_ptr + tl.arange(0, 16 if WORDS < 16 else WORDS)[None, :], mask=is_word, other=0)
        return words ^ -32640 if FORM == INT8 else words  # 8-bit words are of signed codes
    else:
        return pages_ptr + place.to(tl.int64)[:, None] * HEAD_DIM


@triton.jit
def numbers_in_plane(
    source, inside, plane: tl.constexpr, like: tl.constexpr, FORM: tl.constexpr, PLANES: tl.constexpr,
    HEAD_DIM: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One plane `[T, LANES]` of what `load_planes` gives: floats, or whole codes and `code_offset`."""
    if FORM == PLAIN:
        return load_plane(source, inside[:, None], plane, PLANES, HEAD_DIM)
    elif FORM == FP8 and INTERPRETED:
        return from_fp8(source.to(tl.int32) >> (plane * 8), INTERPRETED, like)
    else:
        return unpack(source, plane, 16 // PLANES, like == tl.bfloat16, PTX, INTERPRETED)


@triton.jit
def load_scales(scales_ptr, place, inside, FORM: tl.constexpr):
    """Scale and offset `[T]` in float32 of the heads at `place [T]`, read as one word: GPUs copy no less than 4 bytes
    asynchronously. FP8 has no offset, and two scales in a word."""
    words_ptr = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if FORM == FP8:
        word = tl.load(words_ptr + place // 2, mask=inside, other=0) >> (place % 2 * 16).to(tl.int32)
        scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return scale, scale
    else:
        word = tl.load(words_ptr + place, mask=inside, other=0)
        scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return scale, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def score_keys(
    query, scale, keys_ptr, scales_ptr, place, inside,
    FORM: tl.constexpr, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Products `[R, T]` of queries with the keys at `place [T]`, times `scale`."""
    planes, query_sum = query
    like: tl.constexpr = planes[0].dtype
    scores = tl.zeros((query_sum.shape[0], place.shape[0]), tl.float32)
    source = load_planes(keys_ptr, place, inside, FORM, PLANES, HEAD_DIM)
    for plane in tl.static_range(PLANES):
        keys = numbers_in_plane(source, inside, plane, like, FORM, PLANES, HEAD_DIM, PTX, INTERPRETED)
        scores = multiply(planes[plane], tl.trans(keys), scores, INTERPRETED)
    if FORM == PLAIN:
        return scores * scale
    else:
        key_scale, offset = load_scales(scales_ptr, place, inside, FORM)
        key_scale *= scale
        scores = scores * key_scale[None, :]
        if FORM != FP8:
            offset = offset * scale - code_offset(16 // PLANES, like == tl.bfloat16) * key_scale
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
    share, fade, values, offsets, values_ptr, scales_ptr, place, inside, like: tl.constexpr,
    FORM: tl.constexpr, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums of values in their planes `[R, LANES]`, a tuple, and of offsets `[R]`: faded, and with a tile added."""
    faded = fade[:, None]
    offsets = offsets * fade
    if FORM != PLAIN:
        scale, offset = load_scales(scales_ptr, place, inside, FORM)
        added = share * offset[None, :]
        share = share * scale[None, :]
    share = share if INTERPRETED else share.to(like)
    if FORM == INT4 or FORM == INT8:  # one sum over the keys, which all warps have to exchange
        offsets += tl.sum(added - code_offset(16 // PLANES, like == tl.bfloat16) * share.to(tl.float32), 1)
    source = load_planes(values_ptr, place, inside, FORM, PLANES, HEAD_DIM)
    first = numbers_in_plane(source, inside, 0, like, FORM, PLANES, HEAD_DIM, PTX, INTERPRETED)
    if PLANES == 1:
        values = (multiply(share, first, values[0] * faded, INTERPRETED),)
    else:
        second = numbers_in_plane(source, inside, 1, like, FORM, PLANES, HEAD_DIM, PTX, INTERPRETED)
        if PLANES == 2:
            values = (
                multiply(share, first, values[0] * faded, INTERPRETED),
                multiply(share, second, values[1] * faded, INTERPRETED),
            )
        else:
            third = numbers_in_plane(source, inside, 2, like, FORM, PLANES, HEAD_DIM, PTX, INTERPRETED)
            fourth = numbers_in_plane(source, inside, 3, like, FORM, PLANES, HEAD_DIM, PTX, INTERPRETED)
            values = (
                multiply(share, first, values[0] * faded, INTERPRETED),
                multiply(share, second, values[1] * faded, INTERPRETED),
                multiply(share, third, values[2] * faded, INTERPRETED),
                multiply(share, fourth, values[3] * faded, INTERPRETED),
            )
    return values, offsets


@triton.jit
def attend_tile(
    query, sums, pages, place, inside, seen, scale, CAP: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, KEY_PLANES: tl.constexpr, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEY_PTX: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The sums of rows, with the keys at `place [T]` added that they see."""
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr = pages
    highest, weight, values, offsets = sums
    scores = score_keys(
        query, scale, keys_ptr, key_scales_ptr, place, inside, KEY_FORM, KEY_PLANES, HEAD_DIM, KEY_PTX, INTERPRETED
    )
    if CAP > 0:
        scores = soft_cap(scores, CAP)
    scores = tl.where(inside[None, :] & seen, scores, float("-inf"))
    share, fade, highest, weight = online_softmax_update(scores, highest, weight)
    values, offsets = add_values(
        share, fade, values, offsets, values_ptr, value_scales_ptr, place, inside, query[0][0].dtype,
        VALUE_FORM, PLANES, HEAD_DIM, PTX, INTERPRETED,
    )  # fmt: skip
    return highest, weight, values, offsets


@triton.jit
def load_tile(items_ptr, item, head, SHARED: tl.constexpr, BLOCK_R: tl.constexpr):
    """An item of `list_tiles`, a tuple of its numbers, and of its rows: tokens `[R]`, query heads `[R]`, and whether
    there are such."""
    item_ptr = items_ptr + item * COLUMNS
    first, rows = tl.load(item_ptr + FIRST), tl.load(item_ptr + ROWS)
    row = tl.load(item_ptr + ROW) + tl.arange(0, BLOCK_R)
    sequence, table = tl.load(item_ptr + SEQUENCE), tl.load(item_ptr + TABLE)
    split, splits, part = tl.load(item_ptr + SPLIT), tl.load(item_ptr + SPLITS), tl.load(item_ptr + PART)
    token = row // SHARED
    tile = sequence, table, first, split, splits
    return tile, part + token * splits + split, first + token, head * SHARED + row % SHARED, row < rows


@triton.jit
def tree_rows(position, ancestors_ptr, positions_ptr, token, first, has_row, CHUNK: tl.constexpr):
    """Key of the first token of a sequence, ancestors `[R]` in the chunk of each row, and keys of a tile.

    Rows without ancestors are causal, or of padding, whose keys are not written.
    """
    root = tl.load(positions_ptr + first).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + token, mask=has_row, other=0)
    last = tl.max(tl.where(ancestors != 0, token - first + 1, 0), 0)
    length = tl.where((root < 0) | (last == 0), tl.max(position, 0) + 1, root + last)
    if CHUNK > 0:
        # Deeper ancestors have higher bits, so the lowest bits belong to earlier chunks.
        outside = tl.where(ancestors != 0, position // CHUNK * CHUNK - root, 0)
        for number in range(0, tl.max(outside, 0)):
            ancestors = tl.where(outside > number, ancestors & (ancestors - 1), ancestors)
    return root, ancestors, length


@triton.jit
def reaches(
    key, position, root, ancestors, window, TREE: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """bool `[R, T]`: whether rows at `position [R]` look at `key [T]`. In a tree by the bits of `ancestors [R]` from
    key `root` on, where there are any."""
    seen = key[None, :] <= position[:, None]
    if TREE:
        member = tl.minimum(tl.maximum(key - root, 0), 63)
        branch = (key < root)[None, :] | ((ancestors[:, None] >> member[None, :]) & 1 == 1)
        seen = tl.where((ancestors != 0)[:, None], branch, seen)
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
    from `front` on."""
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
def no_sums(BLOCK_R: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr):
    """Sums of rows that have seen nothing, of values of this WIDTH in planes."""
    highest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_R,), tl.float32)
    offsets = tl.zeros((BLOCK_R,), tl.float32)
    values = tl.zeros((BLOCK_R, 16 if WIDTH // PLANES < 16 else WIDTH // PLANES), tl.float32)
    if PLANES == 1:
        return highest, weight, (values,), offsets
    elif PLANES == 2:
        return highest, weight, (values, values), offsets
    else:
        return highest, weight, (values, values, values, values), offsets


@triton.jit
def store_tile(
    sums, out, tile, part, token, head, has_row, HEADS: tl.constexpr, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Stores rows of a tile: of a sequence that is not split as `rows [T, HEADS, D]`, where a head may have a logit at
    `sink_ptr` that counts in its weight; else `parts [n, HEADS, D]` and `weights [n, HEADS]`, see `store_rows`."""
    out_ptr, part_ptr, weight_ptr, sink_ptr = out
    splits = tile[4]
    if splits > 1:
        place = part.to(tl.int64) * HEADS + head
        store_rows(sums, part_ptr, weight_ptr, place, has_row, PLANES, HEAD_DIM, INTERPRETED)
    else:
        highest, weight, values, offsets = sums
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head, mask=has_row, other=float("-inf")).to(tl.float32) * LOG2_E
            weight += tl.exp2(sink - tl.where(highest == float("-inf"), 0.0, highest))
        place = token.to(tl.int64) * HEADS + head
        final = highest, weight, values, offsets
        store_rows(final, out_ptr, None, place, has_row, PLANES, HEAD_DIM, INTERPRETED)


@triton.jit
def store_rows(
    sums, part_ptr, weight_ptr, place, has_row, PLANES: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Stores what is summed up, divided by its weight, at `place [R]` of `part [..., D]` in its own dtype, and the
    logarithm to base 2 of that weight, unless `weight_ptr` is None: zeros and minus infinity where nothing was seen."""
    highest, weight, values, offsets = sums
    like = part_ptr.dtype.element_ty
    is_empty = weight == 0  # a weight that is not a number stays one
    total = tl.where(is_empty, 1.0, weight)
    out_ptrs = part_ptr + place[:, None] * HEAD_DIM
    is_number = has_row[:, None] & is_lane(PLANES, HEAD_DIM)[None, :]
    for plane in tl.static_range(PLANES):
        number = rounded((values[plane] + offsets[:, None]) / total[:, None], like, INTERPRETED)
        tl.store(out_ptrs + plane_dims(plane, PLANES, HEAD_DIM)[None, :], number.to(like), mask=is_number)
    if weight_ptr is not None:
        tl.store(weight_ptr + place, tl.where(is_empty, float("-inf"), highest + tl.log2(total)), mask=has_row)
