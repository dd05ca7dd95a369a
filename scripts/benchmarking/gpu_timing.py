"""Times of short pieces of GPU work: one CUDA graph, over copies of the data that do not fit in the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

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
    """How many copies of the data one measurement walks through."""
    return max(2, min(64, -(-CACHE_BYTES // max(1, nbytes))))


def seconds_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of the calls, which do the same to different copies: all of them recorded in one graph."""
    stream = torch.cuda.Stream()
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
    buffers = [torch.ones(2**28, dtype=torch.float16, device=device) for _ in range(2)]
    time = seconds_per_call([lambda buffer=buffer: buffer.view(torch.float32).sum() for buffer in buffers])
    return buffers[0].nbytes / time
