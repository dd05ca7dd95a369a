"""Memory that was freed goes back to the system, and threads share arenas."""

import asyncio
import ctypes
import subprocess
import sys

import pytest

from runtime.server import native_memory
from runtime.server.native_memory import (
    BUSY_TRIM_BYTES,
    NUM_ARENAS,
    TRIM_BYTES,
    Trimmer,
    resident_bytes,
    return_free_memory,
    trim_at_times,
)

NEEDS_GLIBC = pytest.mark.skipif(native_memory._glibc() is None, reason="another C library")
CHUNK, CHUNKS = 16 * 1024, 2048
THREADS = """
import ctypes, threading
from runtime.server.native_memory import share_arenas
SHARE
library, together = ctypes.CDLL(None), threading.Barrier(4)
library.malloc.restype = ctypes.c_void_p
def allocate():
    together.wait()
    library.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library.malloc_stats()
"""


@NEEDS_GLIBC
def test_free_chunks_below_one_in_use_are_returned() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    chunks = [library.malloc(CHUNK) for _ in range(CHUNKS)]
    for chunk in chunks:
        ctypes.memset(chunk, 1, CHUNK)
    last = chunks.pop()  # without it the heap would shrink from its end
    for chunk in chunks:
        library.free(chunk)
    before = resident_bytes()
    return_free_memory()
    assert resident_bytes() <= before - CHUNK * CHUNKS // 2
    library.free(last)


@NEEDS_GLIBC
@pytest.mark.parametrize(("statement", "is_shared"), [("", False), ("share_arenas()", True)])
def test_threads_share_arenas(statement: str, is_shared: bool) -> None:
    script = THREADS.replace("SHARE", statement)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    assert (found.count("Arena ") <= NUM_ARENAS) is is_shared


@pytest.mark.parametrize(("is_idle", "growth"), [(True, TRIM_BYTES), (False, BUSY_TRIM_BYTES)])
def test_memory_is_trimmed_when_it_has_grown(is_idle: bool, growth: int) -> None:
    sizes, trims = [0], []
    trimmer = Trimmer(lambda: sizes[-1], lambda: trims.append(sizes[-1]))
    for size in (growth, growth + 1, 2 * growth + 1, 2 * growth + 2):
        sizes.append(size)
        trimmer.look(is_idle)
    assert trims == [growth + 1, 2 * growth + 2]


def test_the_memory_is_looked_at_with_and_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[bool] = []
    monkeypatch.setattr(native_memory, "TRIM_SECONDS", 0.0)
    monkeypatch.setattr(native_memory.Trimmer, "look", lambda self, is_idle: trims.append(is_idle))

    async def run() -> None:
        states = [True, False]
        with pytest.raises(IndexError):
            await trim_at_times(states.pop)

    asyncio.run(run())
    assert trims == [False, True]
