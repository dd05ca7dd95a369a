"""Inner loop of GPTQ and SparseGPT in Triton: a short range of columns in one launch instead of ten launches per
column.

Outputs are independent. A thread processes some of them through all columns of the range in order, and keeps their
errors in registers: the feedback of a column is a sum over them. The matrices are those of
`compress.methods.shared.column_solver`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from compress.cpu.gptq import ColumnGrid

OUTPUTS = 32
"""Number of outputs per program: one per thread of a warp, which gives enough programs to fill the GPU."""


@triton.jit
def change_columns(
    targets_ptr, errors_ptr, feedback_ptr, codes_ptr, scale_ptr, zero_ptr, group_ptr, kept_ptr,
    first, count, outputs, feedback_row, feedback_column, max_code,
    HAS_GRID: tl.constexpr, HAS_KEPT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Processes columns `first` to `first + count`, at most COLUMNS: targets and errors `[I, O]` float32, codes and
    kept `[I, O]` uint8, feedback `[I, I]` float32 by its strides, scale and zero `[groups, O]` float32, group `[I]`
    int64.

    Division and rounding follow IEEE 754, ties to even; the summation order differs from torch.
    """
    TO_WHOLE: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding to it rounds to an integer, ties to even
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
    """Column kernel for one weight on a GPU, in place, like `CpuColumns`; kept weights of a pattern must be selected
    before."""

    targets: Tensor
    errors: Tensor
    feedback: Tensor
    codes: Tensor
    kept: Tensor | None
    grid: ColumnGrid | None

    def change(self, start: int, stop: int) -> None:
        """Processes columns `start` to `stop`."""
        grid, outputs = self.grid, self.targets.shape[1]
        unused = self.targets  # an argument must be a pointer even if it is not read
        change_columns[(triton.cdiv(outputs, OUTPUTS),)](
            self.targets, self.errors, self.feedback, self.codes,
            unused if grid is None else grid.scale, unused if grid is None else grid.zero,
            unused if grid is None else grid.group, unused if self.kept is None else self.kept,
            start, stop - start, outputs, *self.feedback.stride(), 0.0 if grid is None else float(grid.max_code),
            HAS_GRID=grid is not None, HAS_KEPT=self.kept is not None,
            COLUMNS=max(16, triton.next_power_of_2(stop - start)), BLOCK_O=OUTPUTS, num_warps=1,
        )  # fmt: skip
