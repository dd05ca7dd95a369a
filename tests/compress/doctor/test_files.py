"""Damaged, missing and unknown files are named, each with its own finding."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from compress.checkpoint.locate.file_names import INDEX_FILE, SINGLE_FILE
from compress.common.cli import draft_model_path
from compress.common.errors import CheckpointError
from compress.doctor.examine import examine

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Find = Callable[..., set[tuple[str, str]]]


def in_shards(folder: Path) -> Path:
    """The same tensors in two shards with an index."""
    tensors = load_file(folder / SINGLE_FILE)
    names = sorted(tensors)
    shards = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE_FILE).unlink()
    return folder


def change_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    edit(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_whole_shards_are_clean(dense: Path, kinds: Find) -> None:
    assert kinds(in_shards(dense)) == set()


def test_every_missing_shard_is_named(dense: Path) -> None:
    for file in (FIRST, SECOND):
        in_shards(dense).joinpath(file).unlink() if file == FIRST else (dense / file).unlink()
    found = examine(dense).findings
    assert [(each.kind, each.where) for each in found] == [("missing-shard", FIRST), ("missing-shard", SECOND)]
    assert "places" in found[0].problem


def test_an_index_that_names_absent_tensors(dense: Path, kinds: Find) -> None:
    change_index(in_shards(dense), lambda weight_map: weight_map.update({"model.other.weight": FIRST}))
    assert kinds(dense) == {("error", "index-mismatch")}


def test_an_index_without_some_tensors(dense: Path, kinds: Find) -> None:
    change_index(in_shards(dense), lambda weight_map: weight_map.pop("model.norm.weight"))
    assert ("warning", "index-mismatch") in kinds(dense)


def test_a_truncated_file(dense: Path, kinds: Find) -> None:
    path = dense / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-100])
    assert kinds(dense) == {("error", "bad-header")}


def test_a_pointer_in_place_of_the_file(dense: Path) -> None:
    (dense / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (found,) = examine(dense).findings
    assert found.kind == "lfs-pointer"
    assert "git lfs pull" in found.remedy


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_text_that_is_no_json(dense: Path, kinds: Find, file: str) -> None:
    (dense / file).write_text('{"model_type": ')
    assert ("error", "bad-json") in kinds(dense)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("pytorch_model.bin", "not opened", "pickle"),
        ("model.onnx", "x", "unread-weights"),
        ("model.safetensors.incomplete", "x", "unfinished"),
        ("vocab.txt", "", "empty-file"),
        ("dump.xyz", "x", "unknown-file"),
    ],
)
def test_files_that_do_not_belong_there(dense: Path, kinds: Find, name: str, text: str, kind: str) -> None:
    (dense / name).write_text(text)
    assert kinds(dense) == {("warning", kind)}


def test_only_pickles(dense: Path, kinds: Find) -> None:
    (dense / SINGLE_FILE).rename(dense / "pytorch_model.bin")
    assert kinds(dense) == {("warning", "pickle"), ("error", "unreadable")}


def test_a_damaged_gguf_file(tmp_path: Path, kinds: Find) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    assert kinds(tmp_path / "model.gguf") == {("error", "unreadable")}


def test_no_folder_and_no_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        examine(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="does not exist"):
        examine(draft_model_path(), tmp_path / "nothing")
