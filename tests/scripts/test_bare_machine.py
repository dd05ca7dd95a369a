"""Without packages for serving, data sets and other formats, which a machine with a GPU may lack, its check runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
REPOSITORY = SCRIPTS.parent
SCRIPTS_RUN = (
    "sanitize_kernels",
    "check_overlap",
    "tune_kernels",
    "bench_kernels",
    "bench_compress",
    "benchmarking.gpu.models",
    "benchmarking.gpu.serve",
    "gpu_check",
    "checking.facts",
    "checking.kernel_archive",
)
MODULES = ("runtime.llm", "runtime.engine.engine", "runtime.runner.runner", "compress.pipeline.run", *SCRIPTS_RUN)

pytestmark = pytest.mark.full


def run_bare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python, and all that it starts, without these packages."""
    (folder / "sitecustomize.py").write_text("import bare_machine\n")
    paths = (folder, REPOSITORY / "tests" / "support", REPOSITORY, SCRIPTS)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=REPOSITORY)


def test_the_packages_are_gone_with_their_plugins(tmp_path: Path) -> None:
    code = (
        "import importlib.util, importlib.metadata as m; print(importlib.util.find_spec('fastapi'), m.entry_points())"
    )
    found = run_bare(tmp_path, "-c", code)
    assert found.stdout.startswith("None"), found.stderr
    assert "schemathesis" not in found.stdout
    assert run_bare(tmp_path, "-c", "import llguidance").returncode == 1


def test_all_is_imported(tmp_path: Path) -> None:
    """Each module by itself: another one may have imported what it forgets."""
    each = "if not os.fork():\n    import {0}\n    os._exit(0)\nassert not os.wait()[1], '{0}'\n"
    code = "import os, torch, transformers\n" + "".join(map(each.format, MODULES))
    found = run_bare(tmp_path, "-c", code)
    assert found.returncode == 0, found.stderr


def test_every_test_file_is_collected(tmp_path: Path) -> None:
    from checking.questions import ON_GPU, files_with

    arguments = ("--collect-only", "-p", "no:cacheprovider", "-p", "shared_gpu", "-m", "")
    found = run_bare(tmp_path, "-m", "pytest", *arguments, *files_with(ON_GPU))
    assert found.returncode == 0, found.stdout[-3000:]
    assert found.stdout.count("tests/runtime/backends/triton/test_") > 300


@pytest.mark.slow
def test_a_model_is_made_loaded_and_answers(tmp_path: Path) -> None:
    sizes = ("--shape", "tiny", "--device", "cpu", "--short", "--contenders", "engine int4, int4 KV", "engine bf16")
    found = run_bare(tmp_path, "scripts/bench_kernels.py", "gpu-models", *sizes, "--rows", str(tmp_path / "rows.jsonl"))
    assert found.returncode == 0, found.stderr
    written = (tmp_path / "rows.jsonl").read_text()
    assert written.count("decode 4") == 2
    assert "error" not in written
