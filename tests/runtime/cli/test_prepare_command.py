"""`runtime prepare` as a user runs it."""

from pathlib import Path

import pytest
import torch
from runtime_command import runtime_here
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.weights import Int
from compress.cpu.binding import absence, library

pytestmark = pytest.mark.skipif(library() is None, reason=absence())


def test_a_check_of_what_was_prepared(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "dense", dtype=torch.bfloat16)
    pack_model(tmp_path / "dense", tmp_path / "model", lambda module: Int(4, 32))
    made = runtime_here("prepare", "model", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (file,) = (tmp_path / "model" / "prepared").iterdir()
    before = file.read_bytes()
    checked = runtime_here("prepare", "model", "--check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "as they were written" in checked.stdout
    assert f"prepared/{file.name}" in checked.stdout
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    damaged = runtime_here("prepare", "model", "--check", cwd=tmp_path)
    assert damaged.returncode == 1
    assert "bytes of its weights" in damaged.stderr
    assert "runtime prepare model" in damaged.stderr
    assert file.read_bytes() != before
