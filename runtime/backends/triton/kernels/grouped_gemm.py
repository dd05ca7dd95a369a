"""Grouped GEMM over experts of 2- to 4-bit codes: each block of rows multiplies by the weight of one expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.kernels.w4a16 import dequantized_product, layout_constants
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, tile_inputs
from runtime.backends.triton.launcher import BoundKernel, Launcher
from runtime.backends.triton.sizes import cdiv

BLOCK_N, NUM_STAGES = 64, 4
BLOCKS_M = {8: 4, 16: 32, 64: None}
"""Rows of a block, and of an expert, on average, up to which it is taken: few rows are bound by memory."""


@Launcher
@triton.jit(do_not_specialize=["NUM_ROWS"])
def grouped_w4a16_gemm(
    x_ptr, words_table, scale_table, rows_ptr, expert_ptr, y_ptr, NUM_ROWS, N, STRIDE, K, num_tiles,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, SCALE_TYPE: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr, EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr,
    PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`y [NUM_ROWS, N]`: row r is row `r // ROWS_PER_TOKEN` of `x [., K]` times the weight of its expert.

    The tables hold the addresses of each expert's words and scales, with STRIDE rows. Block b has the rows
    `rows [b * BLOCK_M ...]`, of which those from NUM_ROWS on are padding, and the expert `expert [b]`, negative in a
    block without rows.
    """
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= 0:
        row = tl.load(rows_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        n, has_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), row < NUM_ROWS
        SCALE_WORD: tl.constexpr = tl.int64 if SCALE_TYPE.primitive_bitwidth == 32 else tl.int32
        words_ptr = tl.multiple_of(tl.load(words_table + expert).to(tl.pointer_type(tl.int16)), 16)
        scale_ptr = tl.multiple_of(tl.load(scale_table + expert).to(tl.pointer_type(SCALE_WORD)), 16)
        total = dequantized_product(
            x_ptr, words_ptr, scale_ptr, (row // ROWS_PER_TOKEN).to(tl.int64), has_row, n, STRIDE, K,
            0, num_tiles, BITS, GROUP_SIZE, UNIT, SCALE_TYPE, EVEN_K, BFLOAT16, PTX, BLOCK_N, BLOCK_M, STAGES,
            INTERPRETED,
        )  # fmt: skip
        inside = has_row[None, :] & (n < N)[:, None]
        place = row.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Rows sorted by expert, in blocks that each have one expert.

    Attributes:
        rows: int32 `[blocks * block_m]`; padding is `num_rows`.
        experts: int32 `[blocks]`; -1 for a block without rows.
    """

    rows: Tensor
    experts: Tensor
    num_rows: int

    @property
    def block_m(self) -> int:
        return len(self.rows) // len(self.experts)


def rows_per_block(num_rows: int, num_experts: int) -> int:
    """Returns the rows of a block for this number of rows in all."""
    return next(block for block, most in BLOCKS_M.items() if most is None or num_rows <= most * num_experts)


def block_rows(chosen: Tensor, num_experts: int, block_m: int | None = None) -> RowBlocks:
    """Sorts rows into blocks, by operations whose shapes depend on that of `chosen` alone.

    Args:
        chosen: int64 `[T, k]`, expert of every row.
        block_m: rows of a block; None takes what suits their number.
    """
    num_rows = chosen.numel()
    block_m = rows_per_block(num_rows, num_experts) if block_m is None else block_m
    experts, order = chosen.flatten().sort(stable=True)
    counts = (chosen.flatten()[:, None] == torch.arange(num_experts, device=chosen.device)).sum(0)
    blocks = -(-counts // block_m)
    ends = blocks.cumsum(0)
    # A row moves by the padding of the experts before its own.
    shift = (ends - blocks) * block_m - (counts.cumsum(0) - counts)
    most = min(num_rows, num_experts + num_rows // block_m)
    rows = chosen.new_full((most * block_m,), num_rows, dtype=torch.int32)
    places = torch.arange(num_rows, device=chosen.device) + shift[experts]
    rows[places] = order.to(torch.int32)
    owners = torch.searchsorted(ends, torch.arange(most, device=chosen.device), right=True)
    owners = torch.where(owners < num_experts, owners, -1).to(torch.int32)
    return RowBlocks(rows, owners, num_rows)


class GroupedWeight:
    """Weights `[N, K]` of experts with one scheme, read where they lie."""

    def __init__(self, weights: list[InterleavedWeight]) -> None:
        self.first, self._kept = weights[0], weights
        self._kernels: dict[tuple[torch.dtype, int, int], BoundKernel] = {}
        device = self.first.words.device
        self.words, self.scales = (
            torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)
            for tensors in ([weight.words for weight in weights], [weight.scales for weight in weights])
        )

    def product(self, x: Tensor, blocks: RowBlocks, rows_per_token: int) -> Tensor:
        """Multiplies rows `r // rows_per_token` of `x [., K]` by the weight of their expert: `[num_rows, N]`."""
        y = x.new_empty(blocks.num_rows, self.first.shape[0])
        key = x.dtype, blocks.block_m, rows_per_token
        if key not in self._kernels:
            self._kernels[key] = self._prepare(*key)
        grid = cdiv(y.shape[1], BLOCK_N), blocks.experts.shape[0]
        self._kernels[key](grid, x, blocks.rows, blocks.experts, y, blocks.num_rows)
        return y

    def _prepare(self, dtype: torch.dtype, block_m: int, rows_per_token: int) -> BoundKernel:
        first = self.first
        (rows, inputs), (tiles, stride) = first.shape, first.words.shape[:2]
        return grouped_w4a16_gemm.bind(
            words_table=self.words, scale_table=self.scales, N=rows, STRIDE=stride, K=inputs, num_tiles=tiles,
            **layout_constants(first, dtype), ROWS_PER_TOKEN=rows_per_token,
            EVEN_K=inputs % tile_inputs(first.bits) == 0, BLOCK_N=BLOCK_N, BLOCK_M=block_m, STAGES=NUM_STAGES,
            num_warps=2 if block_m < 32 else 4,
        )  # fmt: skip
