"""Damage before verification is refused, and the same command then makes that part again."""

from pathlib import Path

import pytest
import runs

from compress.checkpoint.safetensors import MappedFile
from compress.checkpoint.weights import Int
from compress.common.errors import CheckpointError
from compress.pipeline.resume import Progress
from compress.stages.quantize import QuantizeStage

SHARD, PIECE = "finished/model.safetensors", "pieces/block-00001.safetensors"


def flip(path: Path) -> None:
    """Changes one byte of the codes of a linear."""
    file = MappedFile.open(path)
    name = next(name for name in sorted(file.entries) if "layers.1" in name and name.endswith("_packed"))
    content = bytearray(path.read_bytes())
    content[file.entries[name].place[1]] ^= 0x11
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("method", "damaged", "damage", "kept"),
    [
        ("rtn", SHARD, flip, {0, 1, 2}),
        ("rtn", PIECE, flip, {0, 2}),
        pytest.param("rtn", SHARD, cut, {0, 1, 2}, marks=pytest.mark.full),
        pytest.param("gptq", SHARD, flip, {0, 1, 2}, marks=pytest.mark.full),
        # The inputs of a finished block are gone.
        pytest.param("gptq", PIECE, flip, set(), marks=pytest.mark.full),
        pytest.param("gptq", PIECE, cut, set(), marks=pytest.mark.full),
    ],
)
def test_the_next_run_makes_what_was_damaged_anew(tiny_model, tmp_path, monkeypatch, method, damaged, damage, kept):
    stage, whole = QuantizeStage(method, Int(4, 64)), Progress.assemble

    def spoiled(progress: Progress, *arguments) -> Path:
        if damaged == PIECE:
            damage(progress.folder / damaged)
        folder = whole(progress, *arguments)
        if damaged == SHARD:
            damage(progress.folder / damaged)
        return folder

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "assemble", spoiled)
        with pytest.raises(CheckpointError):
            runs.compress(tiny_model(), tmp_path / "out", stage)
    assert not (tmp_path / "out").exists()
    left = {int(path.stem[-5:]) for path in (tmp_path / "out.partial").glob("pieces/block-*")}
    assert left == kept
    runs.compress(tiny_model(), tmp_path / "out", stage)
    runs.compress(tiny_model(), tmp_path / "undisturbed", stage)
    assert runs.same_bytes(tmp_path / "out", tmp_path / "undisturbed")
    assert not (tmp_path / "out.partial").exists()
