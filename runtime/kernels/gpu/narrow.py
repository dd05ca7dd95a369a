"""Weight-only product for few tokens: weights are the tall operand, tokens the short one, and only sums are scaled.

Sums run over K in splits, each with partial sums of its own, added in order afterwards: deterministic, no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.planes import multiply, unpack


@triton.jit(do_not_specialize=["M"])
def narrow_product(
    x_ptr, words_ptr, scale_ptr, zero_ptr, sums_ptr, part_ptr,
    M, N, K, num_tiles, tiles_per_split,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Partial sums `part [splits, M, N]` float32 of `x [M, K]` and packed weights with N rows, a multiple of BLOCK_N.

    `sums [K / unit, M]` are those of `x` over the unit that shares a scale inside a tile.
    """
    TILE: tl.constexpr = 512 // BITS
    OFFSET: tl.constexpr = 128.0 if BFLOAT16 else 1024.0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, 32)
    has_token = m < M
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * tiles_per_split
    words_ptrs = words_ptr + (first.to(tl.int64) * N + n)[:, None] * 32 + lane[None, :]
    for tile in tl.range(first, tl.minimum(first + tiles_per_split, num_tiles), num_stages=STAGES):
        words = tl.load(words_ptrs, eviction_policy="evict_first")
        for unit in tl.static_range(TILE // UNIT):
            raw = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
                k = tile * TILE + plane * 32 + lane
                inside = has_token[None, :] if EVEN_K else has_token[None, :] & (k < K)[:, None]
                x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=inside, other=0.0)
                raw = multiply(unpack(words, plane, BITS, BFLOAT16, PTX, INTERPRETED), x, raw, INTERPRETED)
            group = (tile * TILE + unit * UNIT) // GROUP_SIZE if GROUP_SIZE > 0 else 0
            scale = tl.load(scale_ptr + group * N + n).to(tl.float32)
            x_sum = tl.load(sums_ptr + (tile * (TILE // UNIT) + unit) * M + m, mask=has_token, other=0.0)
            if HAS_ZERO:
                zero = tl.load(zero_ptr + group * N + n).to(tl.float32)
                total += scale[:, None] * (raw - (OFFSET + zero)[:, None] * x_sum[None, :])
            else:
                total += scale[:, None] * (raw - (OFFSET + MIDPOINT) * x_sum[None, :])
        words_ptrs += N * 32
    tl.store(part_ptr + (split * M + m[None, :]) * N + n[:, None], total, mask=has_token[None, :])
