"""The model of a GPU that stands beside the aims: its limits, and that every aim has a figure."""

import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def model(scripts_on_path: None) -> Any:
    return import_module("benchmarking.gpu.roofline")


def busy(model: Any, **work: float) -> float:
    """Seconds of a launch beside its fixed time."""
    return model.seconds(model.Work(**work), model.H200) - model.H200.launch


def test_each_limit_alone(model: Any) -> None:
    gpu = model.H200
    assert busy(model, nbytes=gpu.stream) == pytest.approx(1)
    assert busy(model, nbytes=0, slots=gpu.slots) == pytest.approx(1)
    assert busy(model, nbytes=0, products=gpu.products) == pytest.approx(1)
    assert gpu.slots == 132 * 4 * 32 * 1.98e9


def test_instructions_and_products_overlap_only_with_a_second_program(model: Any) -> None:
    gpu = model.H200
    work = {"nbytes": 0, "slots": gpu.slots, "products": gpu.products, "programs": 132 * 10, "bytes_under_way": 1e9}
    assert busy(model, **work, at_once=1) == pytest.approx(2)
    assert busy(model, **work, at_once=2) == pytest.approx(1)


def test_few_bytes_under_way_make_memory_slow(model: Any) -> None:
    needed = model.H200.stream * model.H200.latency
    full = {"nbytes": model.H200.stream, "programs": 132, "at_once": 1}
    assert busy(model, **full, bytes_under_way=needed / 132) == pytest.approx(1)
    assert busy(model, **full, bytes_under_way=needed / 132 / 2) == pytest.approx(2)


def test_the_last_wave_and_idle_processors_count(model: Any) -> None:
    work = {"nbytes": 0, "slots": model.H200.slots, "at_once": 2, "bytes_under_way": 1e9}
    assert busy(model, **work, programs=264) == pytest.approx(1)
    assert busy(model, **work, programs=265) == pytest.approx(528 / 265)
    assert busy(model, **work, programs=33) == pytest.approx(4)


def test_a_dense_product_is_bound_by_memory_and_then_by_arithmetic(model: Any) -> None:
    gpu = model.H200
    one, many = (model.dense_seconds(8192, 8192, tokens, gpu) - gpu.launch for tokens in (1, 8192))
    assert one == pytest.approx(2 * (8192**2 + 2 * 8192) / (gpu.stream * gpu.dense_memory))
    assert many == pytest.approx(2 * 8192**3 / (gpu.products * gpu.dense_products))


@pytest.mark.slow
def test_every_aim_has_a_figure(tmp_path: Path) -> None:
    """Compiles the kernels of an 8B model for sm_90, for which Triton must not be in its interpreter."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPTS / "bench_kernels.py"), "gpu-expected", "--json", str(tmp_path / "out.json")]
    subprocess.run(command, capture_output=True, env=environment, check=True)
    found = json.loads((tmp_path / "out.json").read_text())["expected"]
    assert len(found) == 15
    assert all(math.isfinite(each["figure"]) and each["figure"] > 0 for each in found)
