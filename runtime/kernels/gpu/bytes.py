"""Products with 8-bit weights: with 16-bit activations, or with activations rounded to 8 bits per token (W8A8)."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.planes import multiply


@triton.jit(do_not_specialize=["M"])
def byte_product(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, part_ptr, M, N, K, ROWS, blocks_per_split,
    GROUP_SIZE: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Partial sums `part [splits, M, ROWS]` float32 of `x [M, K]` and int8 codes `[ROWS, K]`; scale `[groups, ROWS]`,
    and zero int8 of the same shape. BLOCK_K divides the group. 8 bits are exact in 16-bit floats."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    lane, has_token, has_row = tl.arange(0, BLOCK_K), m < M, n < ROWS
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + lane
        inside = k < K
        places = n.to(tl.int64)[:, None] * K + k[None, :]
        codes = tl.load(codes_ptr + places, mask=has_row[:, None] & inside[None, :], other=0)
        x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=has_token[None, :] & inside[:, None], other=0.0)
        group = block * BLOCK_K // GROUP_SIZE if GROUP_SIZE > 0 else 0
        scale = tl.load(scale_ptr + group * ROWS + n, mask=has_row, other=0.0).to(tl.float32)
        weights = codes.to(tl.float32 if INTERPRETED else x.dtype)
        raw = multiply(weights, x, tl.zeros((BLOCK_N, BLOCK_M), tl.float32), INTERPRETED)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + group * ROWS + n, mask=has_row, other=0).to(tl.float32)
            raw -= zero[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
        total += scale[:, None] * raw
    inside = has_row[:, None] & has_token[None, :]
    tl.store(part_ptr + (split * M + m[None, :]) * ROWS + n[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["M"])
def level_product(
    levels_ptr, codes_ptr, part_ptr, M, K, ROWS, blocks_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Exact partial sums `part [splits, M, ROWS]` int32 of int8 `levels [M, K]` and int8 codes `[ROWS, K]`."""
    program, blocks_n, split = tl.program_id(0), tl.cdiv(ROWS, BLOCK_N), tl.program_id(1)
    first_m = program // (GROUP_M * blocks_n) * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    m = (first_m + program % (GROUP_M * blocks_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % (GROUP_M * blocks_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    lane, has_token, has_row = tl.arange(0, BLOCK_K), m < M, n < ROWS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + lane
        x_mask = has_token[:, None] & (k < K)[None, :]
        levels = tl.load(levels_ptr + m.to(tl.int64)[:, None] * K + k[None, :], mask=x_mask, other=0)
        w_mask = has_row[None, :] & (k < K)[:, None]
        codes = tl.load(codes_ptr + n.to(tl.int64)[None, :] * K + k[:, None], mask=w_mask, other=0)
        total = tl.dot(levels, codes, total, out_dtype=tl.int32)
    places = (split * M + m).to(tl.int64)[:, None] * ROWS + n[None, :]
    tl.store(part_ptr + places, total, mask=has_token[:, None] & has_row[None, :])
