"""Benchmarks of GPU kernels: what can be known without a GPU, and what they say where there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

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

    few, refused = tune_kernels.tune(1, timer)
    assert (few.splits, few.block_m, refused) == (16, 8, 3 * 5)
    many, refused = tune_kernels.tune(64, timer)
    assert (many.kernel, refused) == (GEMM, 3 * 5)


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
def test_the_default_is_among_what_is_measured(tokens: int) -> None:
    from benchmarking.gpu.kernels import candidates

    from runtime.backends.triton.kernels.configs import EXPAND, default_plan

    tried = set(candidates(tokens))
    for rows, tiles in ((4096, 32), (28672, 32), (4096, 112)):
        config = default_plan(4, rows, tiles, 132)[tokens]
        assert config in tried or config.kernel == EXPAND


def test_kernels_are_compiled_before_they_are_measured(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    from jit_without_gpu.ahead import compile_ahead_and_launch
    from jit_without_gpu.own_process import compile_in_own_process

    compiled, launches, later = compile_in_own_process(tmp_path, compile_ahead_and_launch)
    assert compiled >= 3
    assert (launches, later) == (0, 0)


def test_without_a_configuration_that_runs_there_is_none() -> None:
    import tune_kernels

    def timer(tokens: int, config: object) -> float:
        raise TritonError

    TritonError = pytest.importorskip("triton.errors").TritonError
    best, refused = tune_kernels.tune(1, timer)
    assert best is None
    assert refused == 45


def test_bytes_and_copies() -> None:
    from benchmarking.gpu import kernels as gpu_kernels
    from benchmarking.gpu.timing import CACHE_BYTES, num_copies

    assert gpu_kernels.weight_bytes("int4 g128", 8192, 8192) == 8192 * 8192 // 2 + 8192 * 64 * 2
    assert gpu_kernels.weight_bytes("cuBLAS bf16", 8192, 8192) == 2 * 8192 * 8192
    assert num_copies(CACHE_BYTES) == 2
    assert num_copies(2**20) == (64 if torch.cuda.is_available() else 2)
    rows = gpu_kernels.table(
        [
            gpu_kernels.Measured("8x8", 1, "cuBLAS bf16", 4e-6, 1000),
            gpu_kernels.Measured("8x8", 1, "int4 g128", 1e-6, 500),
        ],
        1e9,
    )
    assert [row["x cuBLAS bf16"] for row in rows] == ["1.00", "4.00"]
    assert [row["of the stream"] for row in rows] == ["25%", "50%"]


def test_optional_kernels_are_compared_with_those_that_they_may_replace() -> None:
    from benchmarking.gpu.attention import FLASHINFER
    from benchmarking.gpu.kernels import Measured, speedups

    figures = [
        ("int4 g128", 1, 3e-6),
        ("humming int4 g128", 1, 2e-6),
        ("humming int4 g128", 2, 2e-6),
        ("int8", 1, 1e-6),
    ]
    found = speedups([Measured("8x256", tokens, name, seconds, 1) for name, tokens, seconds in figures])
    assert found == {"w4a16 g128 sym": {"8x256": {"1": 1.5}}}
    spans = [
        Measured("32x128", 4096, name, seconds, 1) for name, seconds in ((FLASHINFER, 1e-3), ("pages 16bit", 3e-3))
    ]
    assert speedups(spans) == {"16-bit pages": {"32x128": {"4096": 3.0}}}


@pytest.mark.parametrize(
    "name",
    [
        "int4 g128",
        "int2 g64",
        "int8",
        "w8a8",
        "fp8",
        "fp8 w8a8",
        "fp8 blocks",
        "mxfp8",
        "nvfp4",
        "nf4",
        "iq4_nl",
        "exl3",
    ],
)
def test_every_linear_that_is_timed_multiplies(gpu: torch.device, name: str) -> None:
    from benchmarking.gpu import kernels as gpu_kernels

    assert name in gpu_kernels.KERNELS
    first, other = gpu_kernels.linears(name, 128, 256, gpu)[:2]
    x = torch.randn(2, 256, device=gpu, dtype=torch.bfloat16)
    assert first(x).shape == (2, 128)
    assert bool(torch.isfinite(first(x)).all())
    assert not torch.equal(first(x), other(x))


def test_a_peer_that_cannot_is_left_out_and_named_but_our_kernels_must() -> None:
    from benchmarking.gpu import kernels as gpu_kernels
    from benchmarking.gpu.kernels import GEMLITE, SPARSE, TINYGEMM, peers

    said: list[str] = []
    device = torch.device("cpu")
    assert gpu_kernels.measure_or_say("64x64", 1, TINYGEMM, device, said.append) is None
    assert said[0].startswith("torch int4 cannot do 64x64 for 1 tokens: ")
    assert (GEMLITE in peers()) == bool(find_spec("gemlite"))
    assert gpu_kernels.weight_bytes(SPARSE, 64, 64) == 64 * 64 * 9 // 8


@pytest.mark.parametrize("form", ["16bit", "fp8", "int8", "int4"])
def test_attention_is_timed_over_copies_that_are_all_read(gpu: torch.device, form: str) -> None:
    from benchmarking.cpu.attention import Case
    from benchmarking.gpu.attention import copies_of, paged_calls

    case = Case(2, 64, heads=4, kv_heads=2, head_dim=32)
    found = paged_calls(case, form, 1, gpu)
    elements = 2 * case.batch * case.context * case.kv_heads * case.head_dim
    assert len(found.calls) == copies_of(case) >= 2
    assert elements / 2 <= found.nbytes <= 2 * elements
    first, other = (call() for call in found.calls[:2])
    assert first.shape == (2, 4 * 32)
    assert bool(torch.isfinite(first).all())
    assert not torch.equal(first, other)


@pytest.mark.full
def test_tiny_shapes_for_the_sanitizer_are_finite(gpu: torch.device) -> None:
    import sanitize_kernels

    found = sanitize_kernels.run(gpu)
    assert found["int4 g128, 70 tokens"].shape == (70, 128)
    assert found["attention of 5 tokens over int4 pages"].shape == (10, 4 * 32)


@pytest.mark.full
def test_every_kernel_is_sanitized(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if gpu.type == "cuda":
        pytest.skip("launches are seen in the interpreter")
    import sanitize_kernels
    from triton.runtime.interpreter import GridExecutor

    from runtime.backends.triton import kernels
    from runtime.backends.triton.launcher import Launcher

    modules = [import_module(f"{kernels.__name__}.{module.name}") for module in iter_modules(kernels.__path__)]
    known = {
        each.function.fn.__name__ for module in modules for each in vars(module).values() if type(each) is Launcher
    }
    launched, launch = set(), GridExecutor.__call__

    def noted(kernel: GridExecutor, *arguments: object, **options: object) -> None:
        launched.add(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    monkeypatch.setattr("runtime.backends.triton.linear.multiplies_fp8", lambda device: True)
    sanitize_kernels.run(gpu)
    assert len(known) > 20
    assert launched == known | {"change_columns", "search_stream"}


def test_figures_are_written_one_after_the_other_and_failures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU: times are made up, and one of our kernels fails."""
    import bench_kernels
    from benchmarking.gpu import kernels as gpu_kernels
    from benchmarking.gpu.kernels import DENSE, Measured

    file, seen = tmp_path / "rows.jsonl", []

    def made_up(shape: str, tokens: int, name: str, device: torch.device) -> Measured:
        if name == "int8":
            raise RuntimeError("out of order")
        seen.append((name, len(file.read_text().splitlines())))
        return Measured(shape, tokens, name, 1e-6, 1000)

    monkeypatch.setattr(gpu_kernels, "measure", made_up)
    sizes = ["--device", "cpu", "--shapes", "64x64", "--tokens", "1", "2", "--pages", "--no-peers", "--rows", str(file)]
    assert bench_kernels.main(["gpu", "--kernels", "int4 g128", "int8", *sizes]) == 1
    assert seen == [("int4 g128", 1), ("int4 g128", 2), (DENSE, 3), (DENSE, 4)]
    facts, *rows = map(json.loads, file.read_text().splitlines())
    assert facts["stream"] > 0
    assert rows[0] == {"shape": "64x64", "tokens": 1, "name": "int4 g128", "seconds": 1e-6, "nbytes": 1000}
    assert "int8 cannot do 64x64 for 2 tokens: out of order" in capsys.readouterr().out
