"""Every kind of text source, and the errors when there is nothing to read."""

import json
import lzma
from pathlib import Path

import pytest

from calibration.sources import DOCUMENT_SEPARATOR, load_texts
from compress.common.errors import DataError

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]


def test_bundled_text_is_large_and_split_into_documents():
    source = load_texts("bundled")
    assert len(source.documents) >= 30
    assert sum(map(len, source.documents)) > 100_000
    assert not any(DOCUMENT_SEPARATOR in document for document in source.documents)


def test_python_manual_names_its_version():
    source = load_texts("pydoc")
    assert sum(map(len, source.documents)) > 300_000
    assert "Python 3." in source.description


def test_text_file(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("some words")
    assert load_texts(str(path)).documents == ("some words",)


@pytest.mark.parametrize("compressed", [False, True])
def test_json_lines_with_text_and_chats(tmp_path: Path, compressed: bool):
    lines = "\n".join([json.dumps({"text": "one"}), "", json.dumps({"messages": CHAT})])
    path = tmp_path / ("a.jsonl.xz" if compressed else "a.jsonl")
    path.write_bytes(lzma.compress(lines.encode()) if compressed else lines.encode())
    assert load_texts(str(path)).documents == ("one", CHAT)


def test_folder_reads_its_files_in_order(tmp_path: Path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert load_texts(str(tmp_path)).documents == ("first", "second")


def test_hash_follows_the_text(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = load_texts(str(path)).sha256
    assert load_texts(str(path)).sha256 == before
    path.write_text("two")
    assert load_texts(str(path)).sha256 != before


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("empty.txt", b"  \n ", "holds no text"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', r"broken.jsonl:2"),
        ("fields.jsonl", b'{"body": "a"}', "neither a `text` string nor a `messages` list"),
        ("empty.jsonl", b"", "holds no text"),
    ],
)
def test_unusable_file_is_refused(tmp_path: Path, name: str, content: bytes, problem: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        load_texts(str(tmp_path / name))
    assert caught.value.remedy


def test_missing_file_is_refused_with_the_names_that_exist():
    with pytest.raises(DataError, match="does not exist") as caught:
        load_texts("./nowhere.txt")
    assert "bundled" in caught.value.remedy
