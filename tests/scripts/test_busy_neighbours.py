"""Compression while other processes never sleep."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from compress.checkpoint.scale_search import encode, search_scales
from compress.checkpoint.weights import Int

NEIGHBOURS = 2


def seconds_of_search() -> float:
    """Wall time of searches for ranges, most of it in hundreds of short products by two threads of PyTorch."""
    torch.set_num_threads(2)
    weight, scheme = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)), Int(4, 128)
    encode(weight, search_scales(weight, scheme, instruction_set=None), scheme)
    begun = time.perf_counter()
    for _ in range(6):
        encode(weight, search_scales(weight, scheme, instruction_set=None), scheme)
        encode(weight, search_scales(weight, scheme), scheme)
    return time.perf_counter() - begun


def spin() -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        pass


@contextmanager
def spinning(count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        time.sleep(2)  # until they have imported what they need
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.full
def test_a_search_beside_two_busy_processes_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each core's share halves. Threads that spin at barriers took 20 times and more: each kept the core that the other
    waited for."""
    from benchmarking.machine import in_own_process

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    alone = in_own_process(seconds_of_search)
    with spinning(NEIGHBOURS):
        beside = min(in_own_process(seconds_of_search) for _ in range(2))
    again = in_own_process(seconds_of_search)
    assert beside < 8 * max(alone, again), (alone, beside, again)
