"""Pieces and assembly: the same bytes every time, everything kept, and nothing half-written when it fails."""

import errno
import json
import os
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from compress.checkpoint.config import packed_config, read_config
from compress.checkpoint.locate.file_names import INDEX_FILE
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.writer import BlockStore, assemble
from compress.common import files
from compress.common.errors import CheckpointError
from compress.common.files import atomic_file, check_out_folder

TOO_LARGE = os.strerror(errno.EFBIG)

TENSORS = {
    "blocks.0.w": torch.arange(12, dtype=torch.int32).view(3, 4),
    "blocks.0.odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "blocks.0.shape": torch.tensor([3, 4]),
    "blocks.0.scale": torch.tensor([[0.5], [-2.0]], dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
}


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@contextmanager
def file_size_limit(size: int):
    """Writing past `size` bytes fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def store(tmp_path, dense_folder) -> BlockStore:
    """The dense model cut into two pieces."""
    files = TensorFiles.open(dense_folder)
    store = BlockStore(tmp_path / "out.partial" / "pieces")
    store.write("rest", {name: files.tensor(name) for name in files.names() if "layers" not in name})
    store.write("blocks", {name: files.tensor(name) for name in files.names() if "layers" in name})
    return store


def test_piece_roundtrip(tmp_path):
    store = BlockStore(tmp_path / "pieces")
    assert not store.has("block-000")
    store.write("block-000", TENSORS, {"digests": {"a": "b"}, "index": 3})
    assert store.has("block-000")
    assert store.read_metadata("block-000") == {"digests": {"a": "b"}, "index": 3}
    loaded = load_file(store.folder / "block-000.safetensors")
    for name, tensor in TENSORS.items():
        assert torch.equal(store.open("block-000").tensor(name), tensor)
        assert torch.equal(loaded[name], tensor), "the safetensors package reads it too"
    before = content(store.folder)
    store.write("block-000", dict(reversed(TENSORS.items())), {"index": 3, "digests": {"a": "b"}})
    assert content(store.folder) == before, "bytes do not depend on the order of a dictionary"
    store.discard()
    assert not store.folder.exists()
    with pytest.raises(CheckpointError, match=r"'block-000'.*--restart"):
        store.open("block-000")


def test_interrupted_piece_is_absent(tmp_path):
    def write_half() -> None:
        with atomic_file(tmp_path / "piece") as stream:
            stream.write(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert content(tmp_path) == {}


def test_assembled_model_is_the_source(store, dense_folder, tmp_path):
    source = TensorFiles.open(dense_folder)
    config = packed_config(read_config(dense_folder), {}, [], {"source": "x"})
    out = assemble(store, ["rest", "blocks"], tmp_path / "out", config=config, source=source)
    store.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    written = content(out)
    original = content(dense_folder)
    assert set(written) == set(original)
    assert {name for name in written if written[name] != original[name]} <= {"config.json", "model.safetensors"}
    with safe_open(out / "model.safetensors", "pt") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        for name in source.names():
            assert torch.equal(theirs.get_tensor(name), source.tensor(name))
    assert "lm_head.weight" not in TensorFiles.open(out), "tied embeddings stay tied"
    assert read_config(out)["compression_config"] == {"source": "x", "format_version": 1}


def test_shards_load_in_transformers_and_bytes_repeat(store, dense_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    options = {"config": read_config(dense_folder), "source": TensorFiles.open(dense_folder)}
    first = assemble(store, ["rest", "blocks"], tmp_path / "first", 100_000, **options)
    second = assemble(store, ["rest", "blocks"], tmp_path / "second", 100_000, **options)
    assert content(first) == content(second)
    index = json.loads((first / INDEX_FILE).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    source = TensorFiles.open(dense_folder)
    assert index["metadata"]["total_size"] == source.nbytes
    files = TensorFiles.open(first)
    for name in source.names():
        assert torch.equal(files.tensor(name), source.tensor(name))
    _, info = AutoModelForCausalLM.from_pretrained(first, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_out_folder_that_exists(store, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="--out"):
        assemble(store, ["rest"], tmp_path / "out")
    assert content(tmp_path / "out") == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/out: {tmp_path}/file .*--out"):
        check_out_folder(tmp_path / "file" / "out")
    assert check_out_folder(tmp_path / "a" / "new") == tmp_path / "a" / "new"


def test_only_what_a_run_has_written_is_named_for_removal(tmp_path, monkeypatch):
    """Commands of a refusal are copied and run: `rm -r .` or `rm -r /` must never be one, nor a name with a blank."""
    old = tmp_path / "my model"
    old.mkdir()
    (old / "compression_report.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"\(rm -r '{re.escape(str(old))}'\) .*--out"):
        check_out_folder(old)
    monkeypatch.chdir(old)
    for out in (".", "", "..", "/", "~", tmp_path):
        with pytest.raises(CheckpointError, match="--out"):
            check_out_folder(out)


def test_tensor_in_two_pieces(store, tmp_path):
    with pytest.raises(CheckpointError, match=r"twice.*--restart"):
        assemble(store, ["rest", "rest"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk_leaves_nothing(store, dense_folder, tmp_path):
    before = content(tmp_path)
    with file_size_limit(200_000), pytest.raises(CheckpointError, match=rf"\({TOO_LARGE}\).*--out"):
        assemble(store, ["rest", "blocks"], tmp_path / "out", source=TensorFiles.open(dense_folder))
    assert content(tmp_path) == before, "no output, and the pieces are still there to resume from"
    with file_size_limit(100), pytest.raises(CheckpointError, match=rf"\({TOO_LARGE}\).*--out"):
        store.write("rest", TENSORS)
    assert content(tmp_path) == before, "a piece that does not fit leaves the old one"
    assemble(store, ["rest", "blocks"], tmp_path / "out")


def test_full_disk_is_seen_before_writing(store, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1_000})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(CheckpointError, match=r"0.0 MB.*0.\d MB"):
        assemble(store, ["rest", "blocks"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial"]


def test_other_errors_are_not_called_full(tmp_path):
    with pytest.raises(OSError, match="Input/output"), files.refuse_when_full(tmp_path):
        raise OSError(errno.EIO, "Input/output error")
