"""Memory for weights: files in huge pages where the system keeps them so."""

import mmap
from pathlib import Path

import pytest

from runtime.backends.cpu import huge_pages
from runtime.backends.cpu.huge_pages import empty_words, map_file, read_into_huge_pages

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
