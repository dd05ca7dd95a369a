"""Memory for weights, keys and values in pages of 2 MB where the system has them: reading 4 KB pages in order waits for
translations of addresses. Where memory has several nodes, each has the part of a weight that its threads read."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from compress.cpu.binding import library

HUGE_PAGE = 2 << 20
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
SAMPLE_BYTES = 32 * HUGE_PAGE
"""Bytes of a file whose pages are looked at, or read, at a time."""
MAPS = Path("/proc/self/smaps")


def empty_words(count: int) -> Tensor:
    """Allocates int32 `[count]` for a weight, from 2 MB on in huge pages."""
    words = empty((count,), torch.int32)
    if 4 * count >= HUGE_PAGE and (native := library()) is not None:
        native.nodes_touch(ctypes.c_void_p(words.data_ptr()), ctypes.c_int64(4 * count))
    return words


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocates a tensor, from 2 MB on in huge pages."""
    size = math.prod(shape) * dtype.itemsize
    if ADVICE is None or size < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_empty(size), dtype=dtype).view(shape)


class TouchedAhead:
    """First writes to memory in blocks, by a thread and before the blocks are used.

    The system fills a page with zeros when it is first written, which takes 0.2 ms for 2 MB, and 5 ms in a virtual
    machine that never had this memory. Blocks of all layers reach their next pages together.

    Args:
        tensors: memory `[layers, blocks, *shape]`.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        largest = max((tensor[0, 0].nbytes for tensor in self._tensors), default=HUGE_PAGE)
        self._blocks_per_page = max(1, HUGE_PAGE // largest)
        self._num_touched = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="first writes")

    def reach(self, num_blocks: int) -> None:
        """Lets the thread write to the first `num_blocks` blocks, those on the same pages, and those on the next page
        of each layer, as far as it did not. Their content stays."""
        goal = (num_blocks // self._blocks_per_page + 2) * self._blocks_per_page
        if goal > self._num_touched:
            self._thread.submit(_touch_blocks, self._tensors, self._num_touched, goal)
            self._num_touched = goal


def _touch_blocks(tensors: Iterable[Tensor], first: int, stop: int) -> None:
    if (native := library()) is None:
        return
    for tensor in tensors:
        for layer in tensor:
            blocks = layer[first:stop]
            native.pages_touch(ctypes.c_void_p(blocks.data_ptr()), ctypes.c_int64(blocks.nbytes))


def map_file(path: Path) -> mmap.mmap:
    """Maps a file where the system keeps it in huge pages; elsewhere reads it into memory that has them."""
    with path.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        _advise(memory)
        if ADVICE is None or len(memory) < HUGE_PAGE or _is_in_huge_pages(memory, path):
            return memory
        copy = _empty(len(memory))
        memory.close()
        stream.readinto(copy)
        return copy


def read_into_huge_pages(path: Path) -> None:
    """Lets the system read a file again that was written in parts: then its cache holds huge pages, not small ones."""
    if ADVICE is None or not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = path.stat().st_size
        for first in range(0, size, SAMPLE_BYTES):  # so that only this much of it is resident here
            length = min(SAMPLE_BYTES, size - first)
            with mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=first) as memory:
                _advise(memory)
                _touch(memory, length)


def _empty(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory)
    return memory


def _advise(memory: mmap.mmap) -> None:
    with suppress(OSError):  # a kernel without them; the memory is there all the same
        if ADVICE is not None:
            memory.madvise(ADVICE)


def _touch(memory: mmap.mmap, size: int) -> int:
    """Reads a byte of each of the first pages."""
    return len(memory[: size : mmap.PAGESIZE])


def _is_in_huge_pages(memory: mmap.mmap, path: Path) -> bool:
    """Whether most of the first bytes of a mapped file are in huge pages."""
    _touch(memory, SAMPLE_BYTES)  # what is not touched is in no page
    return sum(_huge_bytes(path)) > min(SAMPLE_BYTES, len(memory)) // 2


def _huge_bytes(path: Path) -> Iterator[int]:
    """Yields the bytes in huge pages of each map of a file."""
    is_here = False
    with suppress(OSError), MAPS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                is_here = rest.rstrip("\n").endswith(f" {path.resolve()}")
            elif is_here and first == "FilePmdMapped:":
                yield int(rest.split()[0]) * 1024
