"""Memory that native code has freed: with glibc it stays with the process unless it is returned to the system.

Tokenizers, grammars and tensors allocate through `malloc`. Every thread may get an arena of its own, from which memory
that another thread needs is never taken, so a server with threads for tokenizing and compiling keeps the sum of their
peaks. Functions do nothing with other C libraries.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

M_ARENA_MAX = -8
"""Parameter of glibc's `mallopt`."""

NUM_ARENAS = 2
"""With one, threads that tokenize wait for each other: a fifth of their speed."""

TRIM_SECONDS = 5.0
"""Time between two looks at the process's memory."""

TRIM_BYTES = 16 * 2**20
"""Growth since the last trim that is worth another one while there is no work. A trim takes about 0.2 ms per MiB that
it returns."""

BUSY_TRIM_BYTES = 4 * TRIM_BYTES
"""The same under load, more than what steps take and give back."""

STATM = Path("/proc/self/statm")


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


def share_arenas() -> None:
    """Makes all threads allocate from `NUM_ARENAS` arenas. Threads that have one already keep it."""
    if library := _glibc():
        library.mallopt(M_ARENA_MAX, NUM_ARENAS)


def return_free_memory() -> None:
    """Returns free pages to the system. Releases the interpreter lock; allocations wait meanwhile."""
    if library := _glibc():
        library.malloc_trim(0)


def resident_bytes() -> int:
    """Returns the resident memory of this process; 0 where `/proc` does not have it."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if STATM.is_file() else 0


@dataclass(slots=True)
class Trimmer:
    """Returns free memory when the process has grown since the last time."""

    resident: Callable[[], int] = resident_bytes
    trim: Callable[[], None] = return_free_memory
    after_trim: int = 0

    def look(self, is_idle: bool) -> None:
        """Trims if that may be worth it."""
        if self.resident() > self.after_trim + (TRIM_BYTES if is_idle else BUSY_TRIM_BYTES):
            self.trim()
            self.after_trim = self.resident()


async def trim_at_times(is_idle: Callable[[], bool]) -> None:
    """Returns free memory from time to time, until it is cancelled."""
    trimmer = Trimmer()
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trimmer.look, is_idle())
