"""Memory nodes (NUMA) of this machine, and how they are named to the compiled library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

NODES = Path("/sys/devices/system/node")
MAX_NODES, MAX_PROCESSORS = 16, 1024
"""As `memory_nodes.h` has them."""


def memory_nodes(folder: Path = NODES, allowed: Iterable[int] | None = None) -> list[list[int]]:
    """Returns the processors of each node on which this process may run, in the order of nodes; empty if unknown.
    `allowed`: processors that may be used; None asks the system."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    usable = {processor for processor in allowed if processor < MAX_PROCESSORS}
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    nodes = [sorted(usable & parse_processors(_text(file))) for file in files]
    return [node for node in nodes if node][:MAX_NODES]


def parse_processors(text: str) -> set[int]:
    """Returns the numbers of a list such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def processor_masks(nodes: Sequence[Iterable[int]]) -> ctypes.Array[ctypes.c_uint64]:
    """Returns one bit for each processor, `MAX_PROCESSORS` of a node after the other."""
    words = MAX_PROCESSORS // 64
    masks = (ctypes.c_uint64 * (words * len(nodes)))()
    for index, node in enumerate(nodes):
        for processor in node:
            masks[index * words + processor // 64] |= 1 << processor % 64
    return masks


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""
