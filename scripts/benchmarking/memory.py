"""Peak memory of this process, and work in a process of its own so that the peak is the work's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def in_own_process(work: Callable[..., Result], *arguments: object) -> Result:
    """Runs `work(*arguments)` in a fresh interpreter and returns its result; both must be picklable."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def peak_host_bytes() -> int:
    """The most memory this process ever had resident, mapped files among it."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Unlike getrusage, VmHWM does not carry over the parent's peak.
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_device_bytes() -> int | None:
    """The most GPU memory torch ever held in this process; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
