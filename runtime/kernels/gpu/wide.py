"""Weight-only product for many tokens: weights become 16-bit numbers in registers and go straight to the tensor cores.

Each weight is rounded to 16 bits after scaling, like the dequantized checkpoint; sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.planes import multiply, unpack
from runtime.kernels.gpu.tiles import grouped_tile, store_tile


@triton.jit
def dequantized_plane(
    words, zero, scale, plane: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`(code - zero) * scale` of a plane `[n, 32]`, for zero and scale `[n]` in the dtype of the activations.

    The difference is exact; the product is rounded once.
    """
    OFFSET: tl.constexpr = 128.0 if BFLOAT16 else 1024.0
    codes = unpack(words, plane, BITS, BFLOAT16, PTX, INTERPRETED)
    centred = codes - (zero + OFFSET).to(codes.dtype)[:, None]
    product = centred * scale.to(codes.dtype)[:, None]
    return product.to(scale.dtype)


@triton.jit
def zero_and_scale(zero_ptr, scale_ptr, place, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Zero point as float32 and scale as stored, of rows `place [n]` in their arrays."""
    scale = tl.load(scale_ptr + place)
    if HAS_ZERO:
        zero = tl.load(zero_ptr + place).to(tl.float32)
    else:
        zero = tl.full(place.shape, MIDPOINT, tl.float32)
    return zero, scale


@triton.jit(do_not_specialize=["M"])
def wide_product(
    x_ptr, words_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K, ROWS, num_tiles,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`y [M, ROWS]` of `x [M, K]` and packed weights with N rows, a multiple of BLOCK_N."""
    TILE: tl.constexpr = 512 // BITS
    n, m = grouped_tile(M, N, BLOCK_N, BLOCK_M, GROUP_M)
    lane, has_token = tl.arange(0, 32), m < M
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    words_ptrs = words_ptr + n.to(tl.int64)[:, None] * 32 + lane[None, :]
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        words = tl.load(words_ptrs)
        for unit in tl.static_range(TILE // UNIT):
            group = (tile * TILE + unit * UNIT) // GROUP_SIZE if GROUP_SIZE > 0 else 0
            zero, scale = zero_and_scale(zero_ptr, scale_ptr, group * N + n, MIDPOINT, HAS_ZERO)
            for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
                k = tile * TILE + plane * 32 + lane
                inside = has_token[None, :] if EVEN_K else has_token[None, :] & (k < K)[:, None]
                x = tl.load(x_ptr + m[None, :].to(tl.int64) * K + k[:, None], mask=inside, other=0.0)
                weight = dequantized_plane(
                    words, zero, scale.to(x_ptr.dtype.element_ty), plane, BITS, BFLOAT16, PTX, INTERPRETED
                )
                total = multiply(weight, x, total, INTERPRETED)
        words_ptrs += N * 32
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)[:, None]
    store_tile(y_ptr, total, m[None, :], n[:, None], M, ROWS)


@triton.jit
def expand(
    words_ptr, scale_ptr, zero_ptr, weight_ptr, first_row, ROWS, N, K,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    BFLOAT16: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantizes rows from `first_row` on into `weight [ROWS, K]`, for a dense product over very many tokens."""
    TILE: tl.constexpr = 512 // BITS
    tile, row = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n, lane = first_row + row, tl.arange(0, 32)
    words = tl.load(words_ptr + (tile.to(tl.int64) * N + n)[:, None] * 32 + lane[None, :])
    for unit in tl.static_range(TILE // UNIT):
        group = (tile * TILE + unit * UNIT) // GROUP_SIZE if GROUP_SIZE > 0 else 0
        zero, scale = zero_and_scale(zero_ptr, scale_ptr, group * N + n, MIDPOINT, HAS_ZERO)
        for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
            k = tile * TILE + plane * 32 + lane
            weight = dequantized_plane(
                words, zero, scale.to(weight_ptr.dtype.element_ty), plane, BITS, BFLOAT16, PTX, INTERPRETED
            )
            store_tile(weight_ptr, weight, row[:, None], k[None, :], ROWS, K)
