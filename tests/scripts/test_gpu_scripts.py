"""Benchmarks of GPU kernels: what can be known without a GPU, and what they say where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [[sys.executable, "bench_kernels.py", "gpu"], [sys.executable, "tune_kernels.py"]])
def test_without_a_gpu_they_say_so_in_one_line(command: list[str]) -> None:
    environment = {"PYTHONPATH": str(SCRIPTS.parent), "PATH": ""}
    result = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert "GPU" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_fastest_configuration_wins_and_refusals_are_counted() -> None:
    import tune_kernels

    from runtime.backends.triton.kernels.configs import GEMM, KernelConfig

    def timer(tokens: int, config: KernelConfig) -> float:
        if config.num_stages == 5:
            raise RuntimeError("out of shared memory")
        return 1 / config.splits if config.kernel != GEMM else 0.01

    best, refused = tune_kernels.tune([1, 64], timer)
    assert (best[1].splits, best[1].block_m) == (16, 16)
    assert best[64].kernel == GEMM
    assert refused == 2 * 2 * 2 * 5


def test_bytes_and_copies() -> None:
    from benchmarking import gpu_kernels
    from benchmarking.gpu_kernels import CACHE_BYTES, num_copies

    assert gpu_kernels.weight_bytes("int4 g128", 8192, 8192) == 8192 * 8192 // 2 + 8192 * 64 * 2
    assert gpu_kernels.weight_bytes("cuBLAS bf16", 8192, 8192) == 2 * 8192 * 8192
    assert num_copies(CACHE_BYTES) == 2
    assert num_copies(2**20) == 64
    rows = gpu_kernels.table(
        [
            gpu_kernels.Measured("8x8", 1, "cuBLAS bf16", 4e-6, 1000),
            gpu_kernels.Measured("8x8", 1, "int4 g128", 1e-6, 500),
        ],
        1e9,
    )
    assert [row["x cuBLAS bf16"] for row in rows] == ["1.00", "4.00"]
    assert [row["of the stream"] for row in rows] == ["25%", "50%"]


@pytest.mark.parametrize("name", ["int4 g128", "int2 g64", "int8", "w8a8", "fp8", "fp8 w8a8"])
def test_every_linear_that_is_timed_multiplies(gpu: torch.device, name: str) -> None:
    from benchmarking import gpu_kernels

    assert name in gpu_kernels.KERNELS
    first, other = gpu_kernels.linears(name, 128, 256, gpu)[:2]
    x = torch.randn(2, 256, device=gpu, dtype=torch.bfloat16)
    assert first(x).shape == (2, 128)
    assert bool(torch.isfinite(first(x)).all())
    assert not torch.equal(first(x), other(x))


def test_a_peer_that_cannot_is_left_out_and_named_but_our_kernels_must() -> None:
    from benchmarking import gpu_kernels
    from benchmarking.gpu_kernels import GEMLITE, SPARSE, TINYGEMM, peers

    said: list[str] = []
    device = torch.device("cpu")
    assert gpu_kernels.measure_or_say("64x64", 1, TINYGEMM, device, said.append) is None
    assert said[0].startswith("torch int4 cannot do 64x64 for 1 tokens: ")
    assert (GEMLITE in peers()) == bool(find_spec("gemlite"))
    assert gpu_kernels.weight_bytes(SPARSE, 64, 64) == 64 * 64 * 9 // 8


@pytest.mark.parametrize("form", ["16bit", "fp8", "int8", "int4"])
def test_attention_is_timed_over_copies_that_are_all_read(gpu: torch.device, form: str) -> None:
    from benchmarking import gpu_kernels
    from benchmarking.cpu_kernels import Case

    case = Case(2, 64, heads=4, kv_heads=2, head_dim=32)
    found = gpu_kernels.paged_calls(case, form, 1, gpu)
    elements = 2 * case.batch * case.context * case.kv_heads * case.head_dim
    assert len(found.calls) == gpu_kernels.copies_of(case) == 64
    assert elements / 2 <= found.nbytes <= 2 * elements
    first, other = (call() for call in found.calls[:2])
    assert first.shape == (2, 4, 32)
    assert bool(torch.isfinite(first).all())
    assert not torch.equal(first, other)


@pytest.mark.full
def test_tiny_shapes_for_the_sanitizer_are_finite(gpu: torch.device) -> None:
    import sanitize_kernels

    found = sanitize_kernels.run(gpu)
    assert len(found) == 6 * 3 + 4 + 2
    assert found["int4 g128, 70 tokens"].shape == (70, 128)


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OUT": "/nonexistent"}
    return subprocess.run([SCRIPTS / "gpu_check.sh", *arguments], capture_output=True, text=True, env=environment)


def test_parts_of_the_gpu_check_fit_in_ten_minutes_each_and_name_files_that_exist() -> None:
    plan = gpu_check("--dry-run")
    steps = [line.split("\t") for line in plan.stdout.splitlines()]
    assert plan.returncode == 0
    assert {step[0] for step in steps} == {"tests", "kernels", "models"}
    for part, limit in (("tests", 2 * 75), ("kernels", 55), ("models", 0)):
        known = sum(int(step[2]) for step in steps if step[0] == part and step[2].isdigit())
        skipped = limit if any(step[0] == part and step[2] == "-" for step in steps) else 0
        assert known + skipped <= 540, part
    words = {word for step in steps for word in step[3].split()}
    files = {word for word in words if word.startswith(("tests/", "scripts/"))}
    assert files >= {"scripts/tune_kernels.py", "tests/runtime/backends/triton/test_linear.py"}
    assert all((SCRIPTS.parent / file).is_file() for file in files)
    only = gpu_check("--dry-run", "models").stdout.splitlines()
    assert {line.split("\t")[0] for line in only} == {"models"}


def test_the_gpu_check_refuses_unknown_parts_and_machines_without_a_gpu() -> None:
    wrong = gpu_check("speed")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    if not torch.cuda.is_available():
        result = gpu_check()
        assert result.returncode == 1
        assert result.stderr == "error: there is no NVIDIA GPU here\n"


def test_a_summary_has_outcomes_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import check_summary

    lines = ["bench\t0\t61\t150", "ncu\tncu is not installed\t0\t0", "tune\t124\t160\t160"]
    (tmp_path / "steps.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "bench.json").write_text('{"stream": 4e12}')
    assert check_summary.main([str(tmp_path)]) == 1
    content = json.loads((tmp_path / "summary.json").read_text())
    outcomes = [step["outcome"] for step in content["steps"]]
    assert outcomes == ["passed", "skipped: ncu is not installed", "ran out of time"]
    assert content["bench"]["stream"] == 4e12
    assert "ran out of time" in capsys.readouterr().out
    (tmp_path / "steps.tsv").write_text("\n".join(lines[:2]) + "\n")
    assert check_summary.main([str(tmp_path)]) == 0
    (tmp_path / "steps.tsv").write_text("bench\t3\t1\t1\n")
    assert check_summary.main([str(tmp_path)]) == 1
