"""GPU kernels compile for both architectures without a GPU, and the checks on their machine code can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
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
    result = compile_kernels("--every", "211")
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
    assert not kernel_builds._problems(replace(wanted, wants=(), converts=True, tried=True), 16, 300_000, counts)


def test_an_interrupted_run_keeps_what_there_is(monkeypatch, capsys) -> None:
    import compile_kernels as script
    from benchmarking.kernel_builds import Build, Built

    def interrupted(builds: list[Build], jobs: int) -> Iterator[Built]:
        yield Built(builds[0].name, 90, 40, 0, 2048)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "compile_all", interrupted)
    assert script.main(["--arch", "90", "--only", "finish_rows"]) == 1
    printed = capsys.readouterr().out
    assert "1/6 sm_90 finish_rows parts bf16: 40 registers, 2048 B shared, ok" in printed
    assert "interrupted: 5 builds are missing" in printed
    assert "| finish_rows | sm_90 | 1 | 0 | 40 | 2 | 0 |" in printed


def test_the_most_that_a_kernel_takes() -> None:
    from benchmarking.build_summary import worst_of_each_kernel
    from benchmarking.kernel_builds import Built

    built = [
        Built("b x", 90, 9, 0, 1024),
        Built("a x", 80, 7, 0, 4096),
        Built("a y", 80, 5, 8, 512, problems=("spills",)),
    ]
    rows = worst_of_each_kernel(built)
    assert [(row["kernel"], row["for"], row["builds"], row["failed"]) for row in rows] == [
        ("a", "sm_80", "2", "1"),
        ("b", "sm_90", "1", "0"),
    ]
    assert (rows[0]["registers"], rows[0]["shared memory, KiB"], rows[0]["stack, bytes"]) == ("7", "4", "8")


def test_compiling_nothing_is_no_success() -> None:
    result = compile_kernels("--arch", "90", "--only", "no such kernel")
    assert result.returncode == 1
    assert "0 builds" in result.stdout
