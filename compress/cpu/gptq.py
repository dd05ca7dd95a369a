"""The compiled inner loop of GPTQ and SparseGPT; `c/gptq/gptq.h` describes the matrices."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass

from torch import Tensor

from compress.cpu.binding import BEST, function, struct_fields

LONGEST_STRETCH = 64
"""Columns that one call changes, at most; a multiple of every pattern."""


@dataclass(frozen=True, slots=True)
class ColumnGrid:
    """Where values may lie: float32 `scale` and `zero [G, O]`, and int64 `group [I]`, the row of each column."""

    scale: Tensor
    zero: Tensor
    group: Tensor
    max_code: int


@dataclass(frozen=True, slots=True)
class ColumnPattern:
    """N:M that is chosen on the way, and the float32 `spread [I]` of the columns' scores."""

    kept: int
    of: int
    spread: Tensor


class _Stretch(ctypes.Structure):
    """`ColumnStretch` of gptq.h."""

    _fields_ = struct_fields(
        "int64 outputs first count",
        "pointer targets errors feedback",
        "int64 feedback_row feedback_column",
        "pointer codes scale zero group",
        "float max_code",
        "pointer kept spread",
        "int64 pattern_kept pattern_of",
    )


class CpuColumns:
    """Changes columns of one weight in place. All tensors are on the CPU, and contiguous except for `feedback`. Raises
    ValueError: the library is not built.

    Args:
        targets, errors: float32 `[I, O]`.
        feedback: float32 `[I, I]`.
        codes: uint8 `[I, O]`, written where there is a `grid`.
        kept: bool `[I, O]`; written where a `pattern` chooses, else read.
    """

    def __init__(
        self,
        targets: Tensor,
        errors: Tensor,
        feedback: Tensor,
        codes: Tensor,
        kept: Tensor | None,
        grid: ColumnGrid | None,
        pattern: ColumnPattern | None,
        instruction_set: int = BEST,
    ) -> None:
        self._change = function("columns_change", c_void_p, c_int)
        self._instruction_set = instruction_set
        self._kept_alive = targets, errors, feedback, codes, kept, grid, pattern
        self._stretch = _Stretch(
            outputs=targets.shape[1],
            targets=targets.data_ptr(),
            errors=errors.data_ptr(),
            feedback=feedback.data_ptr(),
            feedback_row=feedback.stride(0),
            feedback_column=feedback.stride(1),
        )
        if kept is not None:
            self._stretch.kept = kept.data_ptr()
        if grid is not None:
            self._set_grid(codes, grid)
        if pattern is not None:
            self._stretch.spread = pattern.spread.data_ptr()
            self._stretch.pattern_kept, self._stretch.pattern_of = pattern.kept, pattern.of

    def change(self, start: int, stop: int) -> None:
        """Changes columns `start` to `stop`, at most `LONGEST_STRETCH` of them. Raises ValueError: too many columns, or
        an instruction set that this machine lacks."""
        self._stretch.first, self._stretch.count = start, stop - start
        if self._change(ctypes.byref(self._stretch), self._instruction_set):
            raise ValueError(f"columns {start} to {stop} cannot be changed with set {self._instruction_set}")

    def _set_grid(self, codes: Tensor, grid: ColumnGrid) -> None:
        stretch = self._stretch
        stretch.codes, stretch.max_code = codes.data_ptr(), grid.max_code
        stretch.scale, stretch.zero = grid.scale.data_ptr(), grid.zero.data_ptr()
        stretch.group = grid.group.data_ptr()
