"""What products share: which tile a program makes, and how tiles of plain matrices are loaded and stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_tile(BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows `[BLOCK_N]` of a weight, split of its inputs, and tokens `[BLOCK_M]` of a program (rows, split, tokens)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    return n, tl.program_id(1), m


@triton.jit
def grouped_tile(M, N, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows `[BLOCK_N]` of a weight with N and tokens `[BLOCK_M]` of M. Neighbouring programs share weights: GROUP_M
    blocks of tokens are walked before the next block of rows."""
    program, blocks_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP_M * blocks_n) * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    m = (first + program % (GROUP_M * blocks_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % (GROUP_M * blocks_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return n, m


@triton.jit
def load_tile(pointer, row, column, ROWS, COLUMNS):
    """Elements of a matrix `[ROWS, COLUMNS]`, zeros beyond it. One of `row` and `column` stands, `[n, 1]`, the other
    lies, `[1, k]`."""
    return tl.load(pointer + row.to(tl.int64) * COLUMNS + column, mask=(row < ROWS) & (column < COLUMNS), other=0)


@triton.jit
def store_tile(pointer, tile, row, column, ROWS, COLUMNS):
    """Stores a tile in the matrix's own dtype, but for what lies beyond it; `row` and `column` as of `load_tile`."""
    inside = (row < ROWS) & (column < COLUMNS)
    tl.store(pointer + row.to(tl.int64) * COLUMNS + column, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_sums(part_ptr, sums, split, m, n, M, N):
    """Stores a tile of sums of tokens m and rows n into `part [splits, M, N]`."""
    store_tile(part_ptr + split.to(tl.int64) * M * N, sums, m, n, M, N)
