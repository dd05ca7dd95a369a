"""Times of calls on a GPU, each over copies of data that no cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarking.machine import Stopwatch
from compress.common.errors import ToolkitError

CACHE_BYTES = 2 * 64 * 2**20
"""Copies that are read in turn hold together at least twice the second-level cache of the largest GPU."""
REPLAYS = 9


def require_gpu() -> torch.device:
    """The GPU.

    Raises:
        ToolkitError: there is none.
    """
    if not torch.cuda.is_available():
        raise ToolkitError("this benchmark times kernels on an NVIDIA GPU, and there is none", "Run it where one is")
    return torch.device("cuda")


def num_copies(nbytes: int) -> int:
    """Number of copies of the data that one measurement walks through; without a GPU two."""
    return max(2, min(64 if torch.cuda.is_available() else 2, -(-CACHE_BYTES // max(1, nbytes))))


def seconds_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of the calls, which do the same to different copies: all of them recorded in one graph.

    Without a GPU they are called once, to see whether they work.
    """
    if not torch.cuda.is_available():
        watch = Stopwatch()
        for call in calls:
            call()
        return watch.read()[0] / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(times)


def read_stream(device: torch.device) -> float:
    """Bytes per second that a reduction reads: the ceiling that products are compared with."""
    size = 2**28 if device.type == "cuda" else 2**20
    buffers = [torch.ones(size, dtype=torch.float16, device=device) for _ in range(2)]
    time = seconds_per_call([lambda buffer=buffer: buffer.view(torch.float32).sum() for buffer in buffers])
    return buffers[0].nbytes / time


@dataclass(frozen=True)
class Measured:
    shape: str
    tokens: int
    name: str
    seconds: float
    nbytes: int


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
