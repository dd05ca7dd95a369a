"""The inner loop of GPTQ and SparseGPT in Triton: a short stretch of columns in one launch instead of ten per column.

Outputs do not know of each other. A thread takes some of them through all columns of the stretch, one after the other,
and keeps their errors in registers: what a column is fed back is a sum over them. The matrices are those of
`compress.methods.shared.column_solver`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from compress.cpu.gptq import ColumnGrid

OUTPUTS = 32
"""Outputs of one program: one for each thread of a warp, so that enough programs fill the GPU."""


@triton.jit
def change_columns(
    targets_ptr, errors_ptr, feedback_ptr, codes_ptr, scale_ptr, zero_ptr, group_ptr, kept_ptr,
    first, count, outputs, feedback_row, feedback_column, max_code,
    HAS_GRID: tl.constexpr, HAS_KEPT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Changes columns `first` to `first + count`, at most COLUMNS: targets and errors `[I, O]` float32, codes and kept
    `[I, O]` uint8, feedback `[I, I]` float32 by its strides, scale and zero `[groups, O]` float32, group `[I]` int64.

    Division and rounding are those of IEEE 754, halves to the even code; sums are in an order of their own.
    """
    TO_WHOLE: tl.constexpr = 12582912.0  # 1.5 * 2^23: what is added to it loses its fraction, halves to even
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    lane, inside = tl.arange(0, COLUMNS), o < outputs
    done = tl.zeros((COLUMNS, BLOCK_O), tl.float32)
    for column in tl.range(0, count):
        place = (first + column).to(tl.int64)
        at = place * outputs + o
        rows = (first + lane).to(tl.int64) * feedback_row
        feedback = tl.load(feedback_ptr + rows + place * feedback_column, mask=lane < column, other=0.0)
        target = tl.load(targets_ptr + at, mask=inside, other=0.0) + tl.sum(done * feedback[:, None], 0)
        value = target
        if HAS_KEPT:
            kept = tl.load(kept_ptr + at, mask=inside, other=0) != 0
        if HAS_GRID:
            group = tl.load(group_ptr + place) * outputs + o
            scale = tl.load(scale_ptr + group, mask=inside, other=1.0)
            zero = tl.load(zero_ptr + group, mask=inside, other=0.0)
            steps = tl.minimum(tl.maximum(tl.div_rn(target, scale), -1024.0), 1024.0)
            code = tl.minimum(tl.maximum((steps + TO_WHOLE) - TO_WHOLE + zero, 0.0), max_code)
            if HAS_KEPT:
                code = tl.where(kept, code, zero)
            tl.store(codes_ptr + at, code.to(tl.uint8), mask=inside)
            value = (code - zero) * scale
        if HAS_KEPT:
            value = tl.where(kept, value, 0.0)
        error = tl.load(errors_ptr + at, mask=inside, other=0.0) - value
        tl.store(errors_ptr + at, error, mask=inside)
        tl.store(targets_ptr + at, target if HAS_GRID else value, mask=inside)
        done = tl.where((lane == column)[:, None], error[None, :], done)


@dataclass(frozen=True, slots=True)
class GpuColumns:
    """Changes columns of one weight in place, as `CpuColumns` does on CPUs; a pattern must have been chosen before.

    Attributes:
        targets, errors: float32 `[I, O]`, contiguous.
        feedback: float32 `[I, I]`.
        codes: uint8 `[I, O]`, written where there is a `grid`.
        kept: bool `[I, O]`, contiguous; None keeps all.
    """

    targets: Tensor
    errors: Tensor
    feedback: Tensor
    codes: Tensor
    kept: Tensor | None
    grid: ColumnGrid | None

    def change(self, start: int, stop: int) -> None:
        """Changes columns `start` to `stop`."""
        grid, outputs = self.grid, self.targets.shape[1]
        unused = self.targets  # an argument must be a pointer also where nothing is read
        change_columns[(triton.cdiv(outputs, OUTPUTS),)](
            self.targets, self.errors, self.feedback, self.codes,
            unused if grid is None else grid.scale, unused if grid is None else grid.zero,
            unused if grid is None else grid.group, unused if self.kept is None else self.kept,
            start, stop - start, outputs, *self.feedback.stride(), 0.0 if grid is None else float(grid.max_code),
            HAS_GRID=grid is not None, HAS_KEPT=self.kept is not None,
            COLUMNS=max(16, triton.next_power_of_2(stop - start)), BLOCK_O=OUTPUTS, num_warps=1,
        )  # fmt: skip
