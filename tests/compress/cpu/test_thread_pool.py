"""The pool of the C kernels: callers at once, forks, a busy neighbour; and how many threads a machine lends."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_models import random_weight

from compress.checkpoint.weights import Int
from compress.cpu import binding
from compress.cpu.binding import absence, library, set_threads
from runtime.backends.cpu.linear import CpuLinear

needs_library = pytest.mark.skipif(library() is None, reason=absence())


@pytest.fixture
def linear() -> Iterator[CpuLinear]:
    yield CpuLinear(random_weight((1024, 512), Int(4, 128)))
    set_threads(0)


@needs_library
def test_callers_at_once_get_their_own_results(linear: CpuLinear) -> None:
    set_threads(3)
    inputs = [torch.randn(1 + index % 9, 512, generator=torch.Generator().manual_seed(index)) for index in range(64)]
    expected = [linear(x) for x in inputs]
    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(lambda index: linear(inputs[index % 64]), range(1024)))
    assert all(torch.equal(y, expected[index % 64]) for index, y in enumerate(found))


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own(linear: CpuLinear) -> None:
    set_threads(2)
    x = torch.randn(4, 512)
    expected = linear(x)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(linear(x), expected) for _ in range(50)) else 1)
    deadline = time.monotonic() + 30
    while (finished := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if finished == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert finished == (child, 0)
    assert torch.equal(linear(x), expected)


@needs_library
def test_a_busy_neighbour_costs_its_share_and_not_more(linear: CpuLinear) -> None:
    """Helpers that are interrupted must not stall every product for a time slice, as barriers that spin do (ten times
    slower and more). One thread under the same load is the measure."""
    x = torch.randn(1, 512)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    seconds = {1: 0.0, 2: 0.0}
    try:
        for _ in range(8):
            for count in seconds:
                set_threads(count)
                begin = time.perf_counter()
                for _ in range(2000):
                    linear(x)
                seconds[count] += time.perf_counter() - begin
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert seconds[2] < 3 * seconds[1], seconds


@needs_library
def test_the_number_of_threads_is_clamped() -> None:
    assert set_threads(1) == 1
    assert set_threads(10**6) == 64
    assert set_threads(0) == binding.available_threads()


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert binding.quota(tmp_path, membership) == math.inf
    membership.write_text("0::/slice/job\n")
    assert binding.quota(tmp_path, membership) == math.inf
    write("slice/job/cpu.max", "max 100000\n")
    assert binding.quota(tmp_path, membership) == math.inf
    write("slice/cpu.max", "150000 100000\n")
    assert binding.quota(tmp_path, membership) == 1.5
    membership.write_text("3:cpu,cpuacct:/job\n2:memory:/other\n")
    write("cpu/job/cpu.cfs_quota_us", "-1\n")
    write("cpu/job/cpu.cfs_period_us", "100000\n")
    assert binding.quota(tmp_path, membership) == math.inf
    write("cpu/job/cpu.cfs_quota_us", "50000\n")
    assert binding.quota(tmp_path, membership) == 0.5


@pytest.mark.parametrize(
    ("value", "limit"), [("3", 3), ("2,1", 2), (" 5 ", 5), ("", math.inf), ("0", math.inf), ("many", math.inf)]
)
def test_no_more_threads_than_openmp_may_have(monkeypatch: pytest.MonkeyPatch, value: str, limit: float) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert binding.openmp_limit() == limit
    monkeypatch.setattr(binding, "_siblings", str)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(binding, "quota", lambda: math.inf)
    assert binding.available_threads() == min(4, limit)


def test_at_least_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "quota", lambda: 0.2)
    assert binding.available_threads() == 1
