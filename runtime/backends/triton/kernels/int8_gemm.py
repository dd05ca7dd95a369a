"""Products with weights of 8-bit codes, with activations in 16 bits or rounded to 8 too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.fused_linear import Q8_INT, ActivationLayout, PartialSums, QuantizedInput
from runtime.backends.triton.kernels.common import grouped_tile, load_tile, multiply, split_tile, store_sums
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.w4a16 import GROUP_M


@triton.jit(do_not_specialize=["M"])
def w8a16_gemm(
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
def int8_gemm(
    q8_ptr, codes_ptr, part_ptr, M, K, ROWS, blocks_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Exact partial sums `part [splits, M, ROWS]` int32 of int8 `q8 [M, K]` and int8 codes `[ROWS, K]`."""
    n, m = grouped_tile(M, ROWS, BLOCK_N, BLOCK_M, GROUP_M)
    split = tl.program_id(1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        q8 = load_tile(q8_ptr, m[:, None], k[None, :], M, K)
        codes = load_tile(codes_ptr, n[None, :], k[:, None], ROWS, K)
        total = tl.dot(q8, codes, total, out_dtype=tl.int32)
    store_sums(part_ptr, total, split, m[:, None], n[None, :], M, ROWS)


MAX_BLOCK_K = 128
BLOCK_N = 64
MAX_SKINNY_TOKENS = 64
"""Tokens of one skinny program; more tokens fill the GPU without splits."""
MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class W8A16Linear(PackedLinear):
    """A weight `[N, K]` of signed 8-bit codes, multiplied by 16-bit rows.

    Attributes:
        qweight: int8 `[N, K]`, 128 below the checkpoint's codes.
        scales: `[groups, N]`.
        zero_points: int8 `[groups, N]`, or None when all are 0.
        group_size: inputs that share a scale; 0 when all of a row do.
        bias: `[N]`, or None.
        num_processors: of the GPU.
    """

    qweight: Tensor
    scales: Tensor
    zero_points: Tensor | None
    group_size: int
    bias: Tensor | None
    num_processors: int

    @property
    def nbytes(self) -> int:
        return self.qweight.nbytes + self.scales.nbytes + (0 if self.zero_points is None else self.zero_points.nbytes)

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout()

    def product(self, x: QuantizedInput) -> PartialSums:
        (tokens, inputs), rows = x.rows.shape, len(self.qweight)
        tile = w8a16_tile(tokens, self.group_size)
        parts, grid, blocks_per_split = room_for_sums(x.rows, rows, tile, self.num_processors, torch.float32)
        w8a16_gemm[grid](
            x.rows, self.qweight, self.scales, self.qweight if self.zero_points is None else self.zero_points, parts,
            tokens, inputs, rows, blocks_per_split,
            GROUP_SIZE=self.group_size, HAS_ZERO=self.zero_points is not None, **tile,
            INTERPRETED=triton.knobs.runtime.interpret,
        )  # fmt: skip
        return PartialSums(parts, rows, self.bias)


class W8A8Linear(W8A16Linear):
    """The same weight with one scale per row, multiplied exactly by tokens that are rounded to 8 bits, each with its
    own scale."""

    __slots__ = ()

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout(Q8_INT)

    def product(self, x: QuantizedInput) -> PartialSums:
        if x.beside is None:
            raise ValueError("quantized activations come with the scale of each token")
        (tokens, inputs), rows = x.rows.shape, len(self.qweight)
        tile = int8_tile(tokens)
        parts, grid, blocks_per_split = room_for_sums(x.rows, rows, tile, self.num_processors, torch.int32)
        blocks_n, splits, blocks_m = grid
        int8_gemm[blocks_n * blocks_m, splits](
            x.rows, self.qweight, parts, tokens, inputs, rows, blocks_per_split, **tile
        )
        return PartialSums(parts, rows, self.bias, (x.beside, self.scales))


def w8a16_tile(tokens: int, group_size: int) -> dict[str, Any]:
    """Tile of a product with 16-bit rows for a number of tokens; BLOCK_K divides the group."""
    block_m = min(MAX_SKINNY_TOKENS, max(16, triton.next_power_of_2(tokens)))
    block_k = gcd(group_size, MAX_BLOCK_K)
    return {"BLOCK_N": BLOCK_N, "BLOCK_M": block_m, "BLOCK_K": block_k, "STAGES": 4, "num_warps": 4}


def int8_tile(tokens: int) -> dict[str, Any]:
    """Tile of a product of quantized activations for a number of tokens."""
    tile = {"BLOCK_N": BLOCK_N, "BLOCK_M": max(16, triton.next_power_of_2(tokens)), "num_warps": 4}
    if tokens > MAX_SKINNY_TOKENS:
        tile = {"BLOCK_N": 128, "BLOCK_M": 128, "num_warps": 8}
    return tile | {"BLOCK_K": MAX_BLOCK_K, "GROUP_M": GROUP_M, "STAGES": 3}


def room_for_sums(
    x: Tensor, rows: int, tile: Mapping[str, int], num_processors: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, int, int], int]:
    """Unwritten sums `[splits, M, rows]` of `x [M, K]` by a weight; blocks of rows, splits and blocks of tokens; and
    the blocks of inputs in each split."""
    tokens, inputs = x.shape
    splits, blocks_per_split = split_inputs(rows, inputs, tokens, tile, num_processors)
    grid = triton.cdiv(rows, tile["BLOCK_N"]), splits, triton.cdiv(tokens, tile["BLOCK_M"])
    return x.new_empty(splits, tokens, rows, dtype=dtype), grid, blocks_per_split


def split_inputs(rows: int, inputs: int, tokens: int, tile: Mapping[str, int], num_processors: int) -> tuple[int, int]:
    """Number of splits of K, and the blocks in each: few tokens need them to fill the GPU."""
    blocks = triton.cdiv(inputs, tile["BLOCK_K"])
    if tokens > MAX_SKINNY_TOKENS:
        return 1, blocks
    programs = triton.cdiv(rows, tile["BLOCK_N"]) * triton.cdiv(tokens, tile["BLOCK_M"])
    splits = max(1, min(4 * num_processors // programs, blocks // 4, MAX_SPLITS))
    per_split = triton.cdiv(blocks, splits)
    return triton.cdiv(blocks, per_split), per_split
