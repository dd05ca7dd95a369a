"""GPU kernels compile for both architectures without a GPU, every kernel is among them, and the checks can fail."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SOURCES = [
    *(SCRIPTS.parent / "runtime/backends/triton").rglob("*.py"),
    SCRIPTS.parent / "compress/methods/shared/column_solver_triton.py",
]
pytest.importorskip("triton")
SLICES = 28
"""Number of slices of the builds of an architecture; each takes about a minute of one core."""


def compile_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPTS / "compile_kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def make_launch(
    kernel: str = "split_k_reduce_kernel", constants: Mapping[str, Any] | None = None, tried: bool = False
) -> Any:
    from benchmarking.launches import Launch

    types = (("part_ptr", "*fp32"), ("M", "i32"))
    options = (("num_warps", 4), ("num_stages", 3))
    return Launch("m", kernel, types, frozenset({"part_ptr"}), tuple((constants or {}).items()), options, tried)


@pytest.mark.full
def test_some_of_them() -> None:
    result = compile_kernels("--slice", "1/500")
    assert result.returncode == 0, result.stdout
    assert "4 builds, 0 failed" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("number", range(1, SLICES + 1))
def test_all_that_can_be_launched(arch: str, number: int) -> None:
    result = compile_kernels("--arch", arch, "--slice", f"{number}/{SLICES}", "--jobs", "1")
    assert result.returncode == 0, result.stdout


def test_slices_are_all_builds() -> None:
    import compile_kernels as script

    slices = [range(1250)[script.one_of_many(f"{number}/40")] for number in range(1, 41)]
    assert sorted(chain(*slices)) == list(range(1250))
    for wrong in ("0/40", "41/40", "3"):
        with pytest.raises(ValueError, match=r"."):
            script.one_of_many(wrong)


def test_every_kernel_that_is_launched_is_recorded_and_has_rules() -> None:
    from benchmarking.builds import RULES

    assert launched_in_source() == set(RULES)
    result = compile_kernels("--arch", "90", "--list")
    builds = [line.split() for line in result.stdout.splitlines()]
    assert {words[1] for words in builds} == set(RULES), result.stderr
    assert len({" ".join(words) for words in builds}) == len(builds) > 550


def launched_in_source() -> set[str]:
    """Names of JIT functions in expressions like `kernel[grid](...)`."""
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    jitted = {
        n.name for n in nodes if isinstance(n, ast.FunctionDef) and any("jit" in ast.dump(d) for d in n.decorator_list)
    }
    calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    return jitted & {call.value.id for call in calls if isinstance(call.value, ast.Name)}


def test_a_launch_is_recorded_once_with_all_that_its_code_depends_on() -> None:
    from benchmarking.launches import Recorder

    names = ["x_ptr", "M", "K", "BLOCK"]
    params = [SimpleNamespace(name=name) for name in names]
    compiled = {
        "signature": {"x_ptr": "*bf16", "M": "constexpr", "K": "i32", "BLOCK": "constexpr"},
        "constants": {(1,): 1, (3,): 64},
        "configs": [{(0,): [["tt.divisibility", 16]], (2,): []}],
        "num_warps": 4,
        "num_stages": 3,
    }
    recorder = Recorder()
    for _ in range(2):
        info = SimpleNamespace(module="m", name="kernel", jit_function=SimpleNamespace(params=params))
        assert recorder(fn=info, compile=compiled, key="", repr="")
    (launch,) = recorder.launches
    assert launch.types == (("x_ptr", "*bf16"), ("K", "i32"))
    assert launch.constants == (("M", 1), ("BLOCK", 64))
    assert launch.aligned == {"x_ptr"}
    assert {("num_warps", 4), ("x_ptr%16", True), ("K%16", False)} <= set(launch.choices)


@pytest.mark.parametrize("at_once", [2, 3])
def test_few_launches_show_every_choices_together(at_once: int) -> None:
    from benchmarking.launches import cover, varying_choices

    values = product((1, 2, 3), (1, 2), ("a", "b"), (False, True), (7,))
    launches = [make_launch(constants=dict(zip("ABCDE", each, strict=True))) for each in values]
    chosen = cover(launches, at_once)
    assert 3 * 2 ** (at_once - 1) <= len(chosen) < len(launches)

    def shown(some: list[Any]) -> set[Any]:
        return {each for launch in some for each in combinations(launch.constants, at_once)}

    assert shown(chosen) == shown(launches)
    assert {name for choices in varying_choices(launches) for name, _ in choices} == set("ABCD")


def test_violations_are_found() -> None:
    from benchmarking.builds import Build, find_problems

    def words(launch: Any, *figures: Any) -> list[str]:
        return [problem.split(" ")[0] for problem in find_problems(Build(90, "x", launch), *figures)]

    bad = 16, 300_000, Counter(I2F=100, STL=2), False
    assert words(make_launch("w4a16_skinny_gemm"), *bad) == ["spills:", "300000", "none", "100"]
    assert words(make_launch("w4a16_skinny_gemm", tried=True), *bad) == ["none", "100"]
    assert words(make_launch("split_k_reduce_kernel"), 0, 0, Counter(I2F=100), False) == ["no"]
    assert words(make_launch("split_k_reduce_kernel"), 0, 0, Counter(I2F=100), True) == []
    assert words(make_launch("paged_attention"), 0, 0, Counter(HMMA=1, I2F=100), False) == []
    assert words(make_launch("fp8_gemm"), 0, 0, Counter(QMMA=1), False) == ["none"]
    assert words(make_launch("another"), 0, 0, Counter(), True) == ["another"]


def test_an_interrupted_run_keeps_what_there_is(monkeypatch, capsys) -> None:
    import compile_kernels as script
    from benchmarking.builds import Build, Built

    def interrupted(builds: list[Build], jobs: int) -> Iterator[Built]:
        yield Built(builds[0].name, 90, 40, 0, 2048)
        raise KeyboardInterrupt

    builds = [Build(90, f"split_k_reduce_kernel {number}", make_launch()) for number in range(6)]
    monkeypatch.setattr(script, "all_builds", lambda arch, every: [*builds, Build(90, "other", make_launch())])
    monkeypatch.setattr(script, "compile_all", interrupted)
    assert script.main(["--arch", "90", "--only", "split_k_reduce_kernel"]) == 1
    printed = capsys.readouterr().out
    assert "1/6 sm_90 split_k_reduce_kernel 0: 40 registers, 2048 B shared, ok" in printed
    assert "interrupted: 5 builds are missing" in printed
    assert "| split_k_reduce_kernel | sm_90 | 1 | 0 | 40 | 2 | 0 |" in printed


def test_the_most_that_a_kernel_takes() -> None:
    from benchmarking.builds import Built, worst_of_each_kernel

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


def test_compiling_nothing_is_no_success(monkeypatch, capsys) -> None:
    import compile_kernels as script

    monkeypatch.setattr(script, "all_builds", lambda arch, every: [])
    assert script.main(["--arch", "90"]) == 1
    assert "0 builds" in capsys.readouterr().out
