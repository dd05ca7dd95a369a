"""Factorized layers that a GPU would multiply slower than whole ones: two small products where there was one."""

from __future__ import annotations

from collections.abc import Iterable

from compress.plan import PlanRow

READ_RATE = 4.3e12
"""Bytes per second that a large GPU reads (H200); smaller ones read less, and then less must be saved."""
LAUNCH_SECONDS = 1.5e-6
"""What one more kernel costs, by published measurements of launches in CUDA graphs; not measured here."""


def slower_seconds(whole_bytes: int, factor_bytes: int) -> float:
    """How much longer one token's product is predicted to take with factors than without; negative where they pay.

    For few tokens a product takes as long as its weights are read. The second one costs a launch, for it waits for the
    first.
    """
    return (factor_bytes - whole_bytes) / READ_RATE + LAUNCH_SECONDS


def factor_notes(rows: Iterable[PlanRow]) -> list[str]:
    """One sentence about the layers of a plan for which factors are predicted not to pay."""
    factorized = [row for row in rows if row.assignment and row.assignment.scheme and row.assignment.scheme.rank]
    slower = [row for row in factorized if slower_seconds(_whole_bytes(row), row.bytes_after) > 0]
    if not slower:
        return []
    worst = max(slower, key=lambda row: slower_seconds(_whole_bytes(row), row.bytes_after))
    loss = slower_seconds(_whole_bytes(worst), worst.bytes_after) * 1e6
    return [
        f"{len(slower)} of {len(factorized)} factorized layers are predicted to decode slower on a large GPU than the "
        f"same bits in one piece (e.g. {worst.tensor}: {_whole_bytes(worst):,} bytes whole, {worst.bytes_after:,} as "
        f"factors, {loss:.1f} us more for one token): there factors save space, not time"
    ]


def _whole_bytes(row: PlanRow) -> int:
    """Of the same layer, stored as its factors are but in one piece."""
    scheme = row.assignment.scheme.factor if row.assignment and row.assignment.scheme else None
    outputs, inputs = row.shape
    return row.bytes_before if scheme is None else scheme.stored_bits(outputs, inputs) // 8
