"""GPU kernels compile for both architectures without a GPU, and the checks on their machine code can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytest.importorskip("triton")


def compile_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPTS / "compile_kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_some_of_them() -> None:
    result = compile_kernels("--every", "61")
    assert result.returncode == 0, result.stdout
    assert " 0 failed" in result.stdout


@pytest.mark.slow
def test_all_that_can_be_chosen() -> None:
    result = compile_kernels()
    assert result.returncode == 0, result.stdout


def test_what_is_wrong_is_said() -> None:
    from benchmarking import kernel_builds

    wanted = kernel_builds.Build(90, "x", "m", "k", {}, frozenset(), {}, wants=("HGMMA",))
    counts = Counter(I2F=100, STL=2)
    problems = kernel_builds._problems(wanted, 16, 300_000, counts)
    assert [problem.split(" ")[0] for problem in problems] == ["spills:", "300000", "none", "100"]
    assert not kernel_builds._problems(replace(wanted, wants=(), converts=True), 0, 0, counts)


def test_compiling_nothing_is_no_success() -> None:
    result = compile_kernels("--arch", "90", "--only", "no such kernel")
    assert result.returncode == 1
    assert "0 builds" in result.stdout
