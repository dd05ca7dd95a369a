"""Products with weights of 8-bit codes, with activations in 16 bits or rounded to 8 too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.fused_linear import Q8_INT, ActivationLayout, PartialSums, QuantizedInput
from runtime.backends.triton.kernels.common import grouped_tile, load_tile, prefetch_rows, store_sums, wait_for_inputs
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.split_product import SplitProduct
from runtime.backends.triton.kernels.w4a16 import GROUP_M
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.sizes import cdiv, next_power_of_2


@Launcher
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def int8_gemm(
    q8_ptr, codes_ptr, part_ptr, M, K, ROWS, blocks_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr = False,
):  # fmt: skip
    """Exact partial sums `part [splits, M, ROWS]` int32 of int8 `q8 [M, K]` and int8 codes `[ROWS, K]`."""
    n, m = grouped_tile(M, ROWS, BLOCK_N, BLOCK_M, GROUP_M)
    split = tl.program_id(1)
    first = split * blocks_per_split
    if WAITS:
        prefetch_rows(codes_ptr, n, first * BLOCK_K, ROWS, K)
    wait_for_inputs(WAITS)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
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
class W8A8Linear(PackedLinear):
    """A weight `[N, K]` of signed 8-bit codes with one scale per row, multiplied exactly by tokens that are rounded to
    8 bits, each with its own scale.

    Attributes:
        qweight: int8 `[N, K]`, 128 below the checkpoint's codes.
        scales: `[1, N]`.
        bias: `[N]`, or None.
        num_processors: of the GPU.
    """

    qweight: Tensor
    scales: Tensor
    bias: Tensor | None
    num_processors: int

    @property
    def nbytes(self) -> int:
        return self.qweight.nbytes + self.scales.nbytes

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout(Q8_INT)

    def product(self, x: QuantizedInput) -> PartialSums:
        if x.beside is None:
            raise ValueError("quantized activations come with the scale of each token")
        parts = self._product_for(x.rows.shape[0])(x.rows)
        return PartialSums(parts, self.qweight.shape[0], self.bias, (x.beside, self.scales))

    def _product_for(self, tokens: int) -> SplitProduct:
        size = tile_tokens(tokens)
        if size not in self._products:
            self._products[size] = self._prepare(size)
        return self._products[size]

    def _prepare(self, tokens: int) -> SplitProduct:
        (rows, inputs), tile = self.qweight.shape, int8_tile(tokens)
        splits, blocks_per_split = split_inputs(rows, inputs, tokens, tile, self.num_processors)
        kernel = int8_gemm.bind(codes_ptr=self.qweight, K=inputs, ROWS=rows, blocks_per_split=blocks_per_split, **tile)
        blocks_n = cdiv(rows, tile["BLOCK_N"])
        return SplitProduct(kernel, rows, blocks_n, splits, tile["BLOCK_M"], torch.int32, is_grouped=True)


def tile_tokens(tokens: int) -> int:
    """The number of tokens that stands for all with the same tile and splits."""
    return min(2 * MAX_SKINNY_TOKENS, max(8, next_power_of_2(tokens)))


def int8_tile(tokens: int) -> dict[str, Any]:
    """Tile of a product of quantized activations for a number of tokens."""
    tile = {"BLOCK_N": BLOCK_N, "BLOCK_M": max(16, next_power_of_2(tokens)), "num_warps": 4}
    if tokens > MAX_SKINNY_TOKENS:
        tile = {"BLOCK_N": 128, "BLOCK_M": 128, "num_warps": 8}
    return tile | {"BLOCK_K": MAX_BLOCK_K, "GROUP_M": GROUP_M, "STAGES": 3}


def split_inputs(rows: int, inputs: int, tokens: int, tile: Mapping[str, int], num_processors: int) -> tuple[int, int]:
    """Number of splits of K, and the blocks in each: few tokens need them to fill the GPU."""
    blocks = cdiv(inputs, tile["BLOCK_K"])
    if tokens > MAX_SKINNY_TOKENS:
        return 1, blocks
    programs = cdiv(rows, tile["BLOCK_N"]) * cdiv(tokens, tile["BLOCK_M"])
    splits = max(1, min(4 * num_processors // programs, blocks // 4, MAX_SPLITS))
    per_split = cdiv(blocks, splits)
    return cdiv(blocks, per_split), per_split
