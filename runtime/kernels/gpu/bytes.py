"""Products with 8-bit weights: with 16-bit activations, or with activations rounded to 8 bits per token (W8A8)."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.planes import multiply
from runtime.kernels.gpu.tiles import grouped_tile, load_tile, split_tile, store_sums


@triton.jit(do_not_specialize=["M"])
def byte_product(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, part_ptr, M, K, ROWS, blocks_per_split,
    GROUP_SIZE: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Partial sums `part [splits, M, ROWS]` float32 of `x [M, K]` and int8 codes `[ROWS, K]`; scale `[groups, ROWS]`,
    and zero int8 of the same shape. BLOCK_K divides the group. 8 bits are exact in 16-bit floats."""
    n, split, m = split_tile(BLOCK_N, BLOCK_M)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        codes = load_tile(codes_ptr, n[:, None], k[None, :], ROWS, K)
        x = load_tile(x_ptr, m[None, :], k[:, None], M, K)
        group = block * BLOCK_K // GROUP_SIZE if GROUP_SIZE > 0 else 0
        scale = tl.load(scale_ptr + group * ROWS + n, mask=n < ROWS, other=0.0).to(tl.float32)
        weights = codes.to(tl.float32 if INTERPRETED else x.dtype)
        raw = multiply(weights, x, tl.zeros((BLOCK_N, BLOCK_M), tl.float32), INTERPRETED)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + group * ROWS + n, mask=n < ROWS, other=0).to(tl.float32)
            raw -= zero[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
        total += scale[:, None] * raw
    store_sums(part_ptr, total, split, m[None, :], n[:, None], M, ROWS)


@triton.jit(do_not_specialize=["M"])
def level_product(
    levels_ptr, codes_ptr, part_ptr, M, K, ROWS, blocks_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Exact partial sums `part [splits, M, ROWS]` int32 of int8 `levels [M, K]` and int8 codes `[ROWS, K]`."""
    n, m = grouped_tile(M, ROWS, BLOCK_N, BLOCK_M, GROUP_M)
    split = tl.program_id(1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        levels = load_tile(levels_ptr, m[:, None], k[None, :], M, K)
        codes = load_tile(codes_ptr, n[None, :], k[:, None], ROWS, K)
        total = tl.dot(levels, codes, total, out_dtype=tl.int32)
    store_sums(part_ptr, total, split, m[:, None], n[None, :], M, ROWS)
