"""The builds of the column loop of GPTQ and SparseGPT: with and without grid and masks, by length of a stretch."""

from __future__ import annotations

from benchmarking.kernel_builds import Build


def column_builds(arch: int) -> list[Build]:
    """A stretch may begin and end anywhere: in the pattern of a sparse weight, or at the last columns."""
    return [
        Build.of(
            arch, f"change_columns {columns}{' grid' if grid else ''}{' kept' if kept else ''}",
            "compress.methods.shared.column_solver_triton.change_columns",
            "targets:fp32 errors:fp32 feedback:fp32 codes:u8 "
            f"{'scale:fp32 zero:fp32 group:i64' if grid else 'scale:fp32 zero:fp32 group:fp32'} "
            f"kept:{'i1' if kept else 'fp32'}",
            "first count outputs%16 feedback_row%16 feedback_column max_code:fp32",
            {"HAS_GRID": grid, "HAS_KEPT": kept, "COLUMNS": columns, "BLOCK_O": 32, "num_warps": 1}, converts=True,
        )
        for columns in (16, 32, 64)
        for grid, kept in ((True, False), (True, True), (False, True))
    ]  # fmt: skip
