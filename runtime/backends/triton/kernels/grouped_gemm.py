"""Grouped GEMM over experts of 2- to 4-bit codes: each block of rows multiplies by the weight of one expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.kernels.w4a16 import dequantized_product, layout_constants
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, tile_inputs

BLOCK_N, BLOCKS_M, NUM_STAGES = 64, (16, 64), 4
MOST_ROWS_OF_SMALL_BLOCKS = 32
"""Rows of an expert, on average, up to which blocks hold 16 of them: few rows are bound by memory."""


@triton.jit(do_not_specialize=["NUM_ROWS"])
def grouped_w4a16_gemm(
    x_ptr, words_table, scale_table, zero_table, rows_ptr, expert_ptr, y_ptr, NUM_ROWS, N, STRIDE, K, num_tiles,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    SCALE_TYPE: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr, EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr,
    PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`y [NUM_ROWS, N]`: row r is row `r // ROWS_PER_TOKEN` of `x [., K]` times the weight of its expert.

    The tables hold the addresses of each expert's words, scales and zero points, with STRIDE rows. Block b has the rows
    `rows [b * BLOCK_M ...]`, of which those from NUM_ROWS on are padding, and the expert `expert [b]`, negative in a
    block without rows.
    """
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= 0:
        row = tl.load(rows_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        n, has_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), row < NUM_ROWS
        words_ptr = tl.multiple_of(tl.load(words_table + expert).to(tl.pointer_type(tl.int16)), 16)
        scale_ptr = tl.multiple_of(tl.load(scale_table + expert).to(tl.pointer_type(SCALE_TYPE)), 16)
        zero_ptr = tl.multiple_of(tl.load(zero_table + expert).to(tl.pointer_type(tl.uint8)), 16)
        total = dequantized_product(
            x_ptr, words_ptr, scale_ptr, zero_ptr, (row // ROWS_PER_TOKEN).to(tl.int64), has_row, n, STRIDE, K,
            num_tiles, BITS, GROUP_SIZE, UNIT, MIDPOINT, HAS_ZERO, EVEN_K, BFLOAT16, PTX, BLOCK_N, BLOCK_M, STAGES,
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
    return BLOCKS_M[num_rows > MOST_ROWS_OF_SMALL_BLOCKS * num_experts]


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
        device = self.first.words.device
        zeros = [weight.words if weight.zero_points is None else weight.zero_points for weight in weights]
        self.words, self.scales, self.zeros = (
            torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)
            for tensors in ([weight.words for weight in weights], [weight.scales for weight in weights], zeros)
        )

    def product(self, x: Tensor, blocks: RowBlocks, rows_per_token: int) -> Tensor:
        """Multiplies rows `r // rows_per_token` of `x [., K]` by the weight of their expert: `[num_rows, N]`."""
        first = self.first
        (rows, inputs), (tiles, stride) = first.shape, first.words.shape[:2]
        y = x.new_empty(blocks.num_rows, rows)
        grouped_w4a16_gemm[triton.cdiv(rows, BLOCK_N), len(blocks.experts)](
            x, self.words, self.scales, self.zeros, blocks.rows, blocks.experts, y,
            blocks.num_rows, rows, stride, inputs, tiles, **layout_constants(first, x.dtype),
            SCALE_TYPE=_TYPES[first.scales.dtype], ROWS_PER_TOKEN=rows_per_token,
            EVEN_K=inputs % tile_inputs(first.bits) == 0, BLOCK_N=BLOCK_N, BLOCK_M=blocks.block_m, STAGES=NUM_STAGES,
            num_warps=4,
        )  # fmt: skip
        return y


_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
