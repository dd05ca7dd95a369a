"""Benchmarks of GPU kernels: what can be known without a GPU, and what they say where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [[sys.executable, "bench_kernels.py"], [sys.executable, "tune_kernels.py"]])
def test_without_a_gpu_they_say_so_in_one_line(command: list[str]) -> None:
    environment = {"PYTHONPATH": str(SCRIPTS.parent), "PATH": ""}
    result = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert "there is none" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_fastest_configuration_wins_and_refusals_are_counted() -> None:
    import tune_kernels

    from runtime.kernels.gpu.configs import WIDE, KernelConfig

    def timer(tokens: int, config: KernelConfig) -> float:
        if config.num_stages == 5:
            raise RuntimeError("out of shared memory")
        return 1 / config.splits if config.kernel != WIDE else 0.01

    best, refused = tune_kernels.tune([1, 64], timer)
    assert (best[1].splits, best[1].block_m) == (16, 16)
    assert best[64].kernel == WIDE
    assert refused == 2 * 2 * 2 * 5


def test_bytes_and_copies() -> None:
    import bench_kernels
    from benchmarking.gpu_timing import CACHE_BYTES, num_copies

    assert bench_kernels.weight_bytes("int4 g128", 8192, 8192) == 8192 * 8192 // 2 + 8192 * 64 * 2
    assert bench_kernels.weight_bytes("cuBLAS bf16", 8192, 8192) == 2 * 8192 * 8192
    assert num_copies(CACHE_BYTES) == 2
    assert num_copies(2**20) == 64
    rows = bench_kernels.table(
        [
            bench_kernels.Measured("8x8", 1, "cuBLAS bf16", 4e-6, 1000),
            bench_kernels.Measured("8x8", 1, "int4 g128", 1e-6, 500),
        ],
        1e9,
    )
    assert [row["x cuBLAS bf16"] for row in rows] == ["1.00", "4.00"]
    assert [row["of the stream"] for row in rows] == ["25%", "50%"]
