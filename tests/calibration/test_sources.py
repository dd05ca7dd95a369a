"""Every kind of text source, and refusals that name the fields that are there."""

import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

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
        ("empty.txt", b"  \n ", r"empty\.txt .*no text"),
        ("latin.txt", "caf\xe9".encode("latin-1"), r"latin\.txt .*UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', r"broken.jsonl:2"),
        ("fields.jsonl", b'{"body": "a"}', r"fields\.jsonl:1 .*`text`.*`messages`"),
        ("empty.jsonl", b"", r"empty\.jsonl .*no text"),
        ("deep.jsonl", b"[" * 10**5, r"deep\.jsonl:1"),
        ("digits.jsonl", b"9" * 5000, r"digits\.jsonl:1"),
        ("half.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}', r"half\.jsonl:2"),
    ],
)
def test_unusable_file_is_refused(tmp_path: Path, name: str, content: bytes, problem: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        load_texts(str(tmp_path / name))
    assert caught.value.remedy


def test_missing_file_is_refused_with_the_names_that_exist():
    with pytest.raises(DataError, match=r" \./nowhere\.txt ") as caught:
        load_texts("./nowhere.txt")
    assert "bundled" in caught.value.remedy


def write_table(path: Path, **columns: list) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_with_text(tmp_path: Path):
    path = write_table(tmp_path / "a.parquet", id=[1, 2], text=["one", "two"])
    assert load_texts(str(path)).documents == ("one", "two")


def test_parquet_with_chats(tmp_path: Path):
    path = write_table(tmp_path / "a.parquet", messages=[CHAT, CHAT[:1]])
    assert load_texts(str(path)).documents == (CHAT, CHAT[:1])


def test_the_same_text_has_the_same_hash_in_every_kind_of_file(tmp_path: Path):
    table = write_table(tmp_path / "a.parquet", text=["one", "two"])
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert load_texts(str(table)).sha256 == load_texts(str(lines)).sha256


def test_a_saved_dataset_and_one_of_its_splits(tmp_path: Path):
    train, test = Dataset.from_dict({"text": ["a b", "c"], "n": [1, 2]}), Dataset.from_dict({"text": ["d"]})
    train.save_to_disk(tmp_path / "single")
    DatasetDict(train=train.select_columns("text"), test=test).save_to_disk(tmp_path / "several")
    DatasetDict(test=test).save_to_disk(tmp_path / "other")
    assert load_texts(str(tmp_path / "single")).documents == ("a b", "c")
    assert load_texts(str(tmp_path / "several")).documents == ("a b", "c")
    assert load_texts(str(tmp_path / "several" / "test")).documents == ("d",)
    with pytest.raises(DataError, match="'train'") as caught:
        load_texts(str(tmp_path / "other"))
    assert str(tmp_path / "other" / "test") in caught.value.remedy


def test_a_folder_mixes_kinds_of_files(tmp_path: Path):
    write_table(tmp_path / "b.parquet", text=["second"])
    (tmp_path / "a.txt").write_text("first")
    assert load_texts(str(tmp_path)).documents == ("first", "second")


def test_missing_columns_are_refused_by_name(tmp_path: Path):
    table = write_table(tmp_path / "a.parquet", prompt=["x"], answer=["y"])
    saved = tmp_path / "saved"
    Dataset.from_dict({"prompt": ["x"], "answer": ["y"]}).save_to_disk(saved)
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"prompt": "x", "answer": "y"}))
    for path in (table, saved, lines):
        with pytest.raises(DataError, match=r"`text`.*: prompt, answer\)") as caught:
            load_texts(str(path))
        assert "text" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.parquet", b"PAR1 not really", r"a\.parquet .*\bparquet\b"),
        ("a.jsonl", b"[1]", r"a\.jsonl:1 .*`text`.* object\)"),
        ("a.jsonl", b'{"text": "caf\xe9"}', r"a.jsonl.*UTF-8"),
        ("a.jsonl", b'{"messages": []}', r"a\.jsonl:1 .*: messages\)"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "a"}')[:-8], r"a\.jsonl\.xz .*\bxz\b"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, name: str, content: bytes, problem: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        load_texts(str(tmp_path / name))
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_text_that_is_null_is_refused_with_its_row(tmp_path: Path):
    path = write_table(tmp_path / "a.parquet", text=["one", None])
    with pytest.raises(DataError, match=r"a\.parquet.*row 2"):
        load_texts(str(path))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("self", "measure"),
        ("", "no text"),
        ("a.parquet", r" a\.parquet "),
        ("bundled:2", "^bundled:2 .*weight"),
        ("/dev/zero", "/dev/zero"),
        ("~no.such.user/a.txt", "~no.such.user"),
    ],
)
def test_names_that_are_no_text(spec: str, problem: str):
    with pytest.raises(DataError, match=problem) as caught:
        load_texts(spec)
    assert caught.value.remedy


def test_a_dataset_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_, **__):
        raise ConnectionError("no network\nwith a second line")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(DataError, match=r"'some/dataset' .*\(no network\)") as caught:
        load_texts("some/dataset")
    assert "\n" not in str(caught.value)
    assert ".parquet" in caught.value.remedy


def test_a_named_dataset_gives_its_rows(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load(name, config, split, download_config):
        asked.append((name, config, split))
        return Dataset.from_dict({"text": ["one", "two"]})

    monkeypatch.setattr("datasets.load_dataset", load)
    assert load_texts("some/dataset:plain:test").documents == ("one", "two")
    assert load_texts("some/dataset").description == "dataset some/dataset"
    assert asked == [("some/dataset", "plain", "test"), ("some/dataset", None, "train")]
