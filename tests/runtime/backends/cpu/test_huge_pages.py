"""Memory in huge pages: files where the system keeps them so, and first writes ahead of the use of blocks."""

import ctypes
import mmap
import threading
from pathlib import Path

import pytest
import torch

from compress.cpu.binding import library
from compress.cpu.memory_nodes import memory_nodes
from runtime.backends.cpu import huge_pages
from runtime.backends.cpu.huge_pages import (
    HUGE_PAGE,
    TouchedAhead,
    empty,
    empty_words,
    map_file,
    read_into_huge_pages,
)

SMAPS = """7f0000000000-7f0008000000 rw-p 00000000 fe:00 12 {file}
Rss:              131072 kB
FilePmdMapped:     {huge} kB
7f0010000000-7f0018000000 rw-p 00000000 fe:00 13 {file}.other
FilePmdMapped:    131072 kB
"""


@pytest.mark.parametrize("huge", [0, 40 * 1024])
def test_the_system_says_what_is_in_huge_pages(huge, tmp_path, monkeypatch):
    file, maps = tmp_path / "weights", tmp_path / "smaps"
    file.write_bytes(bytes(3 * mmap.PAGESIZE))
    maps.write_text(SMAPS.format(file=file.resolve(), huge=huge))
    monkeypatch.setattr(huge_pages, "MAPS", maps)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        assert huge_pages._is_in_huge_pages(memory, file) == (huge > 0)


@pytest.mark.skipif(huge_pages.ADVICE is None, reason="a system without huge pages")
def test_without_a_word_of_the_system_a_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(huge_pages, "MAPS", tmp_path / "missing")
    file, content = tmp_path / "weights", bytes(range(256)) * (huge_pages.HUGE_PAGE // 128)
    file.write_bytes(content)
    memory = map_file(file)
    file.write_bytes(b"")
    assert memory[:] == content


def test_a_file_is_mapped_whole(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"some numbers")
    read_into_huge_pages(file)
    assert map_file(file)[:] == b"some numbers"


def test_words_have_the_size_that_is_asked_for() -> None:
    for count in (0, 3, huge_pages.HUGE_PAGE // 4 + 5):
        assert empty_words(count).shape == (count,)


BLOCK_BYTES = HUGE_PAGE // 8
ONE_NODE = pytest.mark.skipif(library() is None or len(memory_nodes()) > 1, reason="pages come at their first write")


RESIDENT = 1


def resident_pages(blocks: torch.Tensor) -> list[bool]:
    """Returns for the first byte of each block whether its page lies in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        pytest.skip("a system that does not tell which pages lie in memory")
    found = []
    for block in (block for layer in blocks for block in layer):
        page, state = block.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, ctypes.c_ubyte()
        assert libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(state)) == 0
        found.append(bool(state.value & RESIDENT))
    return found


def wait_for(ahead: TouchedAhead) -> None:
    ahead._thread.submit(int).result()


@ONE_NODE
def test_blocks_have_their_pages_before_they_are_written() -> None:
    memory = {
        name: empty((3, 64, size), torch.uint8) for name, size in (("codes", BLOCK_BYTES), ("scales", BLOCK_BYTES // 8))
    }
    ahead = TouchedAhead(memory.values())
    ahead.reach(5)
    wait_for(ahead)
    for tensor in memory.values():
        assert all(resident_pages(tensor[:, :16]))
    assert not all(resident_pages(memory["codes"][:, 40:])), "later blocks take no memory yet"


@ONE_NODE
def test_first_writes_keep_what_other_threads_write_meanwhile() -> None:
    for _ in range(3):
        tensor = empty((2, 64, BLOCK_BYTES), torch.uint8)
        writer = threading.Thread(target=tensor.fill_, args=(7,))
        ahead = TouchedAhead([tensor])
        writer.start()
        for num_blocks in (0, 20, 64):
            ahead.reach(num_blocks)
        writer.join()
        wait_for(ahead)
        assert bool((tensor == 7).all())


def test_memory_without_blocks_has_nothing_to_write() -> None:
    ahead = TouchedAhead([torch.empty((4, 0, 8)), torch.empty((0, 5, 8))])
    ahead.reach(3)
    wait_for(ahead)
