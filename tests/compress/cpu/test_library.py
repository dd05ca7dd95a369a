"""Building, loading, and doing without the compiled library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import random_weight

from compress.checkpoint.weights import Int
from compress.common.errors import ToolkitError
from compress.cpu import binding, build
from compress.cpu.binding import absence
from compress.cpu.binding import library as loaded_library
from runtime.backends.cpu.linear import CpuLinear, _functions

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Forgets what is loaded, and afterwards what the test loaded."""
    forgotten = (loaded_library, absence, binding._load, _functions)
    for function in forgotten:
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in forgotten:
        function.cache_clear()


def test_without_the_library_everything_says_why(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(binding, "LIBRARY", tmp_path / "libnative.so")
    assert loaded_library() is None
    assert absence() == "the CPU kernels are not compiled: run python -m compress.cpu.build"
    assert binding.best_instruction_set() == -1
    with pytest.raises(ToolkitError, match=r"no CPU kernels.*not compiled"):
        binding.set_threads(1)
    with pytest.raises(ToolkitError, match="no CPU kernels"):
        CpuLinear(random_weight((64, 64), Int(4, 32)))


def test_its_absence_is_logged_once_with_the_remedy(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(binding, "LIBRARY", tmp_path / "libnative.so")
    for _ in range(3):
        assert absence()
        assert loaded_library() is None
        assert binding.best_instruction_set() == -1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "run python -m compress.cpu.build (until then PyTorch computes" in caplog.text


@pytest.mark.skipif(loaded_library() is None, reason=absence())
def test_nothing_is_logged_where_it_is(fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded_library() is not None
    assert not caplog.records


@pytest.mark.parametrize(
    "command",
    [
        ("runtime", "generate", "--prompt", "The castle", "--max-tokens", "2", "--temperature", "0"),
        pytest.param(("compress", "eval", "--ppl", "--tokens", "128"), marks=pytest.mark.full),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_go_on_without_it_and_say_so_once(command: tuple[str, ...], tmp_path: Path) -> None:
    missing = (
        "from pathlib import Path; from compress.cpu import binding; "
        f"setattr(binding, 'LIBRARY', Path('{tmp_path}/none'))"
    )
    code = f"{missing}; from {command[0]}.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code, *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("run python -m compress.cpu.build (until then PyTorch computes") == 1, result.stderr


def test_a_file_that_is_no_library_is_not_fatal(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "libnative.so"
    file.write_bytes(b"not a library")
    fresh.setattr(binding, "LIBRARY", file)
    assert loaded_library() is None
    assert "cannot be loaded" in absence()


@pytest.mark.skipif(loaded_library() is None, reason=absence())
def test_a_library_older_than_its_sources_is_not_used(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(binding, "source_digest", lambda: "other")
    assert loaded_library() is None
    assert "older than their sources" in absence()


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolkitError, match=r"no C compiler on PATH.*apt install gcc"):
        build.build(tmp_path / "libnative.so")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")
def test_a_compiler_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "broken.c").write_text("int broken(\n")
    target = tmp_path / "libnative.so"
    target.write_bytes(b"before")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "c")
    with pytest.raises(ToolkitError, match=r"failed: .*broken\.c"):
        build.build(target)
    assert target.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "libnative.so"]


def test_an_unknown_instruction_set_is_refused() -> None:
    if loaded_library() is None:
        pytest.skip(absence())
    linear = CpuLinear(random_weight((64, 64), Int(4, 32)), instruction_set=7)
    with pytest.raises(ToolkitError, match="lacks the instruction set"):
        linear(torch.zeros(1, 64))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"cannot write .*absent.*pip install"):
        build.build(tmp_path / "absent" / "libnative.so")
