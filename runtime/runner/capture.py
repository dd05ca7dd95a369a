"""Capturing a computation, to run it again with one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Computation = Callable[[], None]
"""Reads and writes tensors that stay where they are."""

NUM_WARM_UPS = 2
"""Runs before the captured one: libraries and compilers make themselves ready in the first, which cannot be captured
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)."""


class Capture(Protocol):
    """Captures computations that run one at a time."""

    def __call__(self, compute: Computation) -> Computation:
        """Returns a function that runs `compute` again. `compute` may run any number of times while capturing."""


class CudaCapture:
    """Captures CUDA graphs. They share one pool of memory, so together they need as much as the largest one; hence what
    they compute must be written to tensors from outside of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Computation) -> Computation:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU for something else while this one records.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph.replay
