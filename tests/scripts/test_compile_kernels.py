"""GPU kernels that served decoders launch compile for both architectures without a GPU, and the checks can fail."""

from __future__ import annotations

import ast
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from jit_without_gpu.builds import Build
from jit_without_gpu.cases import CASES
from jit_without_gpu.own_process import processes_that_compile

ROOT = Path(__file__).parents[2]
SOURCES = [
    *(ROOT / "runtime/backends/triton").rglob("*.py"),
    ROOT / "compress/methods/shared/column_solver_triton.py",
    ROOT / "compress/checkpoint/trellis_search_triton.py",
]
OTHERS = ["columns of GPTQ", "trellis codes", "search for trellis codes"]


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """A process that compiles, with one cache for all of them: decoders share many builds."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    with processes_that_compile(1, tmp_path_factory.getbasetemp().parent / "compiled") as pool:
        yield pool


@pytest.mark.full
@pytest.mark.every_combination
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_what_a_decoder_launches(compilers: Executor, case: str, arch: int) -> None:
    import compile_kernels as script

    results = list(script.results_of(compilers, [script.CARDS[arch]], [case]))
    assert [str(result) for result in results if result.problems] == []
    assert {result.arch for result in results} == {arch}


def test_every_kernel_that_is_launched_has_rules() -> None:
    from benchmarking.gpu.builds import RULES

    assert launched_in_source() == set(RULES)


def launched_in_source() -> set[str]:
    """Names of kernels: functions that are decorated by `Launcher`, and JIT functions in `kernel[grid](...)`."""
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    decorators = {
        node.name: " ".join(map(ast.dump, node.decorator_list)) for node in nodes if isinstance(node, ast.FunctionDef)
    }
    calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    called = {call.value.id for call in calls if isinstance(call.value, ast.Name)}
    return {name for name, dump in decorators.items() if "Launcher" in dump or (name in called and "jit" in dump)}


def make_build(kernel: str, shared_bytes: int = 0, aligned: frozenset[str] = frozenset()) -> Build:
    types = (("part_ptr", "*fp32"), ("V", "i32"))
    constants = (("HEAD_DIM", 128), ("BLOCK", 64), ("PTX", "lop3.b32 $0, $1, 0x000f000f, 0x43004300;"), ("EVEN", True))
    return Build(kernel, 90, types, aligned, constants, 4, 3, shared_bytes, 1.0, False, Path("a.cubin"))


def test_violations_are_found() -> None:
    from benchmarking.gpu.builds import find_problems, name_of

    def words(build: Build, *figures: Any) -> list[str]:
        return [problem.split(" ")[0] for problem in find_problems(build, *figures)]

    bad = 40, Counter(I2F=100, STL=2), False
    assert words(make_build("w4a16_skinny_gemm", 300_000), *bad) == ["spills:", "300000", "none", "100"]
    assert words(make_build("w4a16_skinny_gemm"), 0, Counter(HGMMA=1), False) == []
    assert words(make_build("split_k_reduce_kernel"), 0, Counter(I2F=100), False) == ["no"]
    assert words(make_build("split_k_reduce_kernel"), 0, Counter(I2F=100), True) == []
    assert words(make_build("fused_qk_norm_rope_kv_write"), 0, Counter(), False) == ["no"]
    assert words(make_build("sample_parts"), 0, Counter(), False) == []
    assert words(make_build("sample_parts", aligned=frozenset({"V"})), 0, Counter(), False) == ["no"]
    assert words(make_build("paged_attention"), 0, Counter(HMMA=1, I2F=100), False) == []
    assert words(make_build("fp8_gemm"), 0, Counter(QMMA=1), False) == ["none"]
    assert words(make_build("another"), 0, Counter(), True) == ["another"]
    assert name_of(make_build("another")) == "another *fp32 HEAD_DIM=128 BLOCK=64 EVEN 4w"


def test_builds_are_inspected_once_and_failures_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    import compile_kernels as script
    from benchmarking.gpu.builds import Built

    def found(case: str, card: Any) -> Any:
        problem = "fails" if case == "broken" else ""
        return script.Found(case, [make_build("one"), make_build(case)], problem)

    monkeypatch.setattr(script, "builds_of", found)
    monkeypatch.setattr(script, "inspect", lambda build: Built(build.kernel, build.arch, 1, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        results = list(script.results_of(pool, [script.CARDS[90]], ["two", "broken"]))
    names = sorted(result.name for result in results)
    assert names == ["broken", "broken", "one", "two"]
    assert [result.problems for result in results if result.problems] == [("fails",)]


def test_an_interrupted_run_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import compile_kernels as script
    from benchmarking.gpu.builds import Built

    def interrupted(*_: Any) -> Iterator[Built]:
        yield Built("split_k_reduce_kernel 0", 90, 40, 0, 2048)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "results_of", interrupted)
    assert script.main(["--arch", "90", "--cases", "16 bits"]) == 1
    printed = capsys.readouterr().out
    assert "1 sm_90 split_k_reduce_kernel 0: 40 registers, 2048 B shared, ok" in printed
    assert "interrupted" in printed
    assert "| split_k_reduce_kernel | sm_90 | 1 | 0 | 40 | 2 | 0 |" in printed


@pytest.mark.parametrize(
    ("found", "status"), [([], 1), (["one"], 0), (["one", "two"], 0), (["bad", "two"], 1)], ids=str
)
def test_a_run_succeeds_with_builds_of_which_none_fails(
    monkeypatch: pytest.MonkeyPatch, found: list[str], status: int
) -> None:
    import compile_kernels as script
    from benchmarking.gpu.builds import Built

    built = [Built(name, 90, 1, 0, 0, problems=("spills",) if name == "bad" else ()) for name in found]
    monkeypatch.setattr(script, "results_of", lambda *_: iter(built))
    monkeypatch.setattr(script, "RULES", {"one": None, "two": None})
    assert script.main(["--arch", "90", "--cases", "16 bits"]) == status
    assert script.main(["--arch", "90"]) == (0 if status == 0 and len(found) == 2 else 1)


def test_the_most_that_a_kernel_takes() -> None:
    from benchmarking.gpu.builds import Built, worst_of_each_kernel

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
