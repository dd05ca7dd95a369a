"""Kernels that were compiled, a row for each: how many builds, and the most that one of them takes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarking.kernel_builds import Built
from benchmarking.tables import Row


def worst_of_each_kernel(results: Sequence[Built]) -> list[Row]:
    """By kernel, and by architecture, in the order in which they came first."""
    groups: dict[tuple[str, int], list[Built]] = {}
    for result in sorted(results, key=lambda result: (result.name.split(" ")[0], result.arch)):
        groups.setdefault((result.name.split(" ")[0], result.arch), []).append(result)
    return [
        {
            "kernel": kernel,
            "for": f"sm_{arch}",
            "builds": str(len(group)),
            "failed": str(sum(bool(result.problems) for result in group)),
            "registers": str(max(result.registers for result in group)),
            "shared memory, KiB": f"{max(result.shared_bytes for result in group) / 1024:.0f}",
            "stack, bytes": str(max(result.stack_bytes for result in group)),
        }
        for (kernel, arch), group in groups.items()
    ]
