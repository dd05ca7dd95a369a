"""What packing the embedding would save, for the summary of a run that left it as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.checkpoint.scheme import Scheme
from compress.reporting.units import size, times
from compress.stages.quantize import EMBEDDING_TARGET

if TYPE_CHECKING:
    from compress.plan import Plan

_WORTH_SAYING = 0.1
"""Share of the file that must be saved."""
_SCHEME = Scheme(8, None)


def embedding_tip(plan: Plan, total_bytes: int) -> str:
    """One line with numbers; empty where there is little to save, or nothing is left to do.

    Args:
        total_bytes: size of the weights as written.
    """
    saved = sum(
        row.bytes_before - _SCHEME.stored_bits(row.shape[0], row.shape[1]) // 8
        for row in plan.rows
        if row.assignment is None and row.tensor.endswith(f".{EMBEDDING_TARGET}.weight")
    )
    if saved < _WORTH_SAYING * total_bytes:
        return ""
    then = total_bytes - saved
    return f"--embedding-bits 8 makes it {size(then)} ({times(plan.bytes_before, then)}), for this runtime only"
