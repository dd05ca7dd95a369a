"""Models that the `gguf` package split are read as one; parts that are missing or of another model are refused."""

import os
from pathlib import Path

import pytest
import torch
from gguf_models import save_family, write_gguf
from tiny_models import load_reference

from compress.checkpoint.gguf.file import GGUFFile
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.gguf.parts import open_parts
from compress.checkpoint.gguf.writer import NewTensor
from compress.checkpoint.gguf.writer import write_gguf as write_file
from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import CheckpointError

pytest.importorskip("gguf")

PARTS = [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_reference(save_family(tmp_path_factory.mktemp("models") / "llama", "llama"), torch.float32)


def kind_of(name: str) -> str:
    return "q4_1" if "ffn_up" in name else "q4_0"


@pytest.fixture
def parts(model, tmp_path) -> list[Path]:
    (tmp_path / "split").mkdir()
    write_gguf(model, tmp_path / "split" / "m.gguf", kind_of, tensors_per_part=8)
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == PARTS
    return [tmp_path / "split" / name for name in PARTS]


def test_parts_are_read_as_one_file(model, parts, tmp_path):
    write_gguf(model, tmp_path / "whole.gguf", kind_of)
    whole, split = PackedCheckpoint.open(folder_of(tmp_path / "whole.gguf")), PackedCheckpoint.open(folder_of(parts[0]))
    assert (split.schemes, split.config) == (whole.schemes, whole.config)
    assert split.files.names() == whole.files.names()
    assert all(torch.equal(split.tensor(name), whole.tensor(name)) for name in whole.files)
    assert split.files.notes == whole.files.notes
    assert split.files.file_bytes == sum(path.stat().st_size for path in parts)
    split.files.release()


def test_parts_behind_links_are_found_by_the_names_of_the_links(parts, tmp_path):
    """The hub's cache has files by their digests, and links to them by their names."""
    (tmp_path / "snapshot").mkdir()
    for number, part in enumerate(parts):
        blob = part.rename(part.with_name(f"digest{number}"))
        (tmp_path / "snapshot" / part.name).symlink_to(blob)
    linked = folder_of(tmp_path / "snapshot" / PARTS[0])
    assert linked.name == PARTS[0].removesuffix(".gguf")
    assert len(PackedCheckpoint.open(linked).files.names()) > 8


def test_another_part_of_other_time_is_another_folder(parts):
    folder = folder_of(parts[0])
    assert folder_of(parts[0]) == folder
    os.utime(parts[2], ns=(1, 1))
    assert folder_of(parts[0]) != folder


def test_missing_parts_are_named(parts):
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"split has no {PARTS[1]}. Download") as refusal:
        folder_of(parts[0])
    assert "\n" not in str(refusal.value)
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=rf"{PARTS[1]} and 1 more"):
        open_parts(parts[0])


def test_another_part_names_the_first(parts):
    with pytest.raises(CheckpointError, match=rf"{PARTS[1]} .*3 parts.*{PARTS[0]}"):
        folder_of(parts[1])


def rewrite(path: Path, **changes: object) -> None:
    """Writes a file again with other metadata."""
    file = GGUFFile.open(path)
    blocks = {name: file.blocks(name).clone() for name in file.tensors}
    tensors = [
        NewTensor(name, each.type, each.shape, lambda name=name: blocks[name]) for name, each in file.tensors.items()
    ]
    write_file(path, {**file.metadata, **changes}, tensors)


DAMAGED = {
    "other number": (1, {"split.no": 2}, "part 2 from 0 on, of 3"),
    "other count": (2, {"split.count": 4}, "part 2 from 0 on, of 4"),
    "count of the first": (0, {"split.count": 4}, "one of 4 parts, and its name says 3"),
    "text": (0, {"split.count": "3"}, "one of '3' parts"),
    "tensors": (0, {"split.tensors.count": 99}, "announces 99 tensors, its parts have"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_parts_that_contradict_each_other_are_refused(case, parts):
    place, changes, reason = DAMAGED[case]
    rewrite(parts[place], **changes)
    with pytest.raises(CheckpointError, match=reason):
        open_parts(parts[0])


def test_a_tensor_in_two_parts_is_refused(parts):
    os.replace(parts[1], parts[2])
    os.link(parts[2], parts[1])
    rewrite(parts[2], **{"split.no": 2})
    with pytest.raises(CheckpointError, match=r"announces .* tensors, its parts have"):
        open_parts(parts[0])
