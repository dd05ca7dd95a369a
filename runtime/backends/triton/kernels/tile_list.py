"""The work list of a step's attention, computed on the device once for all layers with the same heads and windows.

A captured step computes it from whatever its buffers hold, so long sequences are split there, too.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.kernels.common import wait_for_inputs
from runtime.backends.triton.launcher import BoundKernel, Launcher
from runtime.backends.triton.sizes import cdiv
from runtime.backends.triton.tiling import MAX_SPLITS, Tiling
from runtime.core.batch import RaggedRows

SEQUENCE, TABLE, FIRST, ROW, ROWS, SPLIT, SPLITS, PART = map(tl.constexpr, range(8))
"""Columns of an item: sequence, where its block table begins, its first token; first row of the tile among those of the
sequence, and number of these; split and number of splits; first part of the sequence's results."""
COLUMNS = tl.constexpr(8)
BLOCK = 64


@triton.jit
def sequence_work(starts_ptr, positions_ptr, sequence, count, tile_rows, shared, reach):
    """First token, number of tokens, keys that they attend to and tiles of sequences `[S]`: see `Tiling`."""
    inside = sequence < count
    first = tl.load(starts_ptr + sequence, mask=inside, other=0).to(tl.int32)
    tokens = tl.load(starts_ptr + sequence + 1, mask=inside, other=0).to(tl.int32) - first
    root = tl.load(positions_ptr + first, mask=tokens > 0, other=-1).to(tl.int32)
    keys = tl.where(root < 0, 0, root + tokens)
    keys = tl.minimum(keys, tl.where(reach > 0, reach - 1 + tokens, keys))
    return first, tokens, keys, tl.cdiv(tokens * shared, tile_rows)


@Launcher
@triton.jit(  # one build for all steps and cuts
    do_not_specialize=["count", "num_items", "tile_rows", "shared", "kv_heads", "programs", "reach", "least"],
    do_not_specialize_on_alignment=["starts_ptr", "tables_ptr", "positions_ptr"],
)
def list_tiles(
    starts_ptr, tables_ptr, positions_ptr, items_ptr, parts_ptr, count, num_items,
    tile_rows, shared, kv_heads, programs, reach, least, MOST: tl.constexpr, BLOCK: tl.constexpr,
    WAITS: tl.constexpr = False,
):  # fmt: skip
    """Lists the tiles of `count` sequences with their splits as items `[num_items, COLUMNS]`: without rows
    where fewer are needed.

    Also where the results of every token go, `parts [T, 2]`: the first part, and how many; none where one split stores
    the result itself. Programs (block of items).
    """
    wait_for_inputs(WAITS)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, count, BLOCK):
        first, tokens, keys, tiles = sequence_work(
            starts_ptr, positions_ptr, begin + lane, count, tile_rows, shared, reach
        )
        total += tiles.to(tl.int64) * keys
    work = tl.cdiv(tl.sum(total, 0) * kv_heads, programs)
    each = tl.maximum(work, least).to(tl.int32)
    item = tl.program_id(0) * BLOCK + lane
    none = tl.zeros((BLOCK,), tl.int32)
    found = none, none, none, none, none, none, none
    num_before, parts_before = 0, 0
    for begin in range(0, count, BLOCK):
        sequence = begin + lane
        first, tokens, keys, tiles = sequence_work(starts_ptr, positions_ptr, sequence, count, tile_rows, shared, reach)
        table = tl.load(tables_ptr + sequence, mask=sequence < count, other=0).to(tl.int32)
        splits = tl.minimum(tl.maximum(tl.cdiv(keys, each), 1), MOST)
        ends = num_before + tl.cumsum(tiles * splits, 0)
        held = tl.where(splits > 1, tokens * splits, 0)
        part = parts_before + tl.cumsum(held, 0) - held
        place = item[:, None] - (ends - tiles * splits)[None, :]
        is_own = (place >= 0) & (item[:, None] < ends[None, :])
        found = (
            found[0] + tl.sum(tl.where(is_own, sequence[None, :], 0), 1),
            found[1] + tl.sum(tl.where(is_own, table[None, :], 0), 1),
            found[2] + tl.sum(tl.where(is_own, first[None, :], 0), 1),
            found[3] + tl.sum(tl.where(is_own, tokens[None, :], 0), 1),
            found[4] + tl.sum(tl.where(is_own, splits[None, :], 0), 1),
            found[5] + tl.sum(tl.where(is_own, part[None, :], 0), 1),
            found[6] + tl.sum(tl.where(is_own, place, 0), 1),
        )
        num_before += tl.sum(tiles * splits, 0)
        parts_before += tl.sum(held, 0)
    sequence, table, first, tokens, splits, part, place = found
    splits = tl.maximum(splits, 1)
    row, split = place // splits * tile_rows, place % splits
    item_ptrs, is_item = items_ptr + item * COLUMNS, item < num_items
    tl.store(item_ptrs + SEQUENCE, sequence, mask=is_item)
    tl.store(item_ptrs + TABLE, table, mask=is_item)
    tl.store(item_ptrs + FIRST, first, mask=is_item)
    tl.store(item_ptrs + ROW, row, mask=is_item)
    tl.store(item_ptrs + ROWS, tokens * shared, mask=is_item)
    tl.store(item_ptrs + SPLIT, split, mask=is_item)
    tl.store(item_ptrs + SPLITS, splits, mask=is_item)
    tl.store(item_ptrs + PART, part, mask=is_item)
    stop = tl.minimum(row + tile_rows, tokens * shared)
    for number in range(0, tile_rows // shared + 2):
        token = row // shared + number
        is_token = is_item & (split == 0) & (token * shared < stop)
        part_ptrs = parts_ptr + (first + token) * 2
        tl.store(part_ptrs, part + token * splits, mask=is_token)
        tl.store(part_ptrs + 1, tl.where(splits > 1, splits, 0), mask=is_token)


class TileList(NamedTuple):
    """Work list of a step.

    Attributes:
        items: int32 `[n, 8]`, see `list_tiles`.
        parts: int32 `[T, 2]`, where the results of every token lie.
        num_parts: room that these need.
        most_splits: bound on the splits of a sequence; 1 where none is split.
    """

    items: Tensor
    parts: Tensor
    num_parts: int
    most_splits: int

    def room(self, query: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Returns room for results of splits `[n, heads, width]` and their weights `[n, heads]`, in float32."""
        parts = query.new_empty(self.num_parts, heads, width, dtype=torch.float32)
        return parts, query.new_empty(self.num_parts, heads, dtype=torch.float32)


def tile_list(rows: RaggedRows, num_tokens: int, tiling: Tiling) -> TileList:
    """Lists the tiles of the first `num_tokens` rows of a step, which are those of all sequences of `rows`.

    Raises:
        ValueError: the sequences have another number of rows, where their lengths are known.
    """
    if rows.lengths and (listed := sum(tokens for tokens, _ in rows.lengths)) != num_tokens:
        raise ValueError(f"sequences with {listed} rows in a step of {num_tokens}")
    count, device = len(rows.tables), rows.positions.device
    num_items = tiling.most_tiles(count, num_tokens, rows.longest)
    most_splits = tiling.most_splits(rows.longest, rows.num_keys)
    if rows.lengths and most_splits > 1:
        # Not the exact number: other lengths must not cause another build of what joins them.
        most_splits = MAX_SPLITS if max(tiling.splits(rows.lengths)) > 1 else 1
    if most_splits > 1:
        num_items += tiling.added_splits
    items = torch.empty(num_items, COLUMNS.value, dtype=torch.int32, device=device)
    parts = torch.empty(num_tokens, 2, dtype=torch.int32, device=device)
    kernel = _bound(tiling)
    kernel((cdiv(num_items, BLOCK),), rows.starts, rows.tables, rows.positions, items, parts, count, num_items)
    num_parts = tiling.most_parts(num_tokens, most_splits) if most_splits > 1 else 1
    return TileList(items, parts, num_parts, most_splits)


@cache
def _bound(tiling: Tiling) -> BoundKernel:
    numbers = tiling._asdict()
    return list_tiles.bind(tile_rows=numbers.pop("rows"), **numbers, MOST=MAX_SPLITS, BLOCK=BLOCK)
