"""Time of a kernel on a GPU from what was counted: bytes, issue slots, products, programs and bytes in flight.

A kernel takes as long as the slowest of its memory, its instructions and its tensor cores, stretched by the last wave
of programs, and a fixed time for its launch. Memory is read as fast as bytes are under way (Little's law).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Gpu:
    """A GPU, by its data sheet, and assumptions about it.

    Attributes:
        stream_share: of the peak bandwidth, that a plain reduction reads at.
        latency: seconds until bytes arrive from memory under load.
        launch: seconds of a node of a CUDA graph beside its work.
        dense_memory, dense_products: shares of stream and of peak products that cuBLAS reaches.
    """

    name: str
    bandwidth: float
    products: float
    clock: float
    processors: int
    stream_share: float = 0.9
    latency: float = 0.75e-6
    launch: float = 1.5e-6
    dense_memory: float = 0.9
    dense_products: float = 0.7

    @property
    def stream(self) -> float:
        return self.bandwidth * self.stream_share

    @property
    def slots(self) -> float:
        """Issue slots of single threads a second: four schedulers a processor, 32 lanes each."""
        return self.processors * 4 * 32 * self.clock


H200 = Gpu("H200", 4.8e12, 989e12, 1.98e9, 132)


@dataclass(frozen=True)
class Work:
    """One launch.

    Attributes:
        nbytes: read and written.
        slots: issue slots of single threads.
        products: floating-point operations on tensor cores.
        programs: of the launch; 0 where they are not counted.
        at_once: programs that fit on a processor.
        bytes_under_way: of one program.
    """

    nbytes: float
    slots: float = 0.0
    products: float = 0.0
    programs: int = 0
    at_once: int = 1
    bytes_under_way: float = 0.0


def seconds(work: Work, gpu: Gpu) -> float:
    """Time of a launch."""
    bandwidth, tail = gpu.stream, 1.0
    if work.programs:
        room = gpu.processors * work.at_once
        running = min(work.programs, room)
        bandwidth = min(bandwidth, running * work.bytes_under_way / gpu.latency)
        tail = ceil(work.programs / room) * room / work.programs if work.programs > room else 1.0
    used = min(1.0, work.programs / gpu.processors) if work.programs else 1.0
    issue, products = work.slots / gpu.slots / used, work.products / gpu.products / used
    # One program alone does not issue the next tile's instructions while its products run.
    computing = issue + products if work.at_once == 1 else max(issue, products)
    return max(work.nbytes / bandwidth, computing * tail) + gpu.launch


def dense_seconds(rows: int, columns: int, tokens: int, gpu: Gpu) -> float:
    """Time of cuBLAS with 16-bit numbers."""
    nbytes = 2 * (rows * columns + tokens * (rows + columns))
    products = 2 * rows * columns * tokens / gpu.dense_products
    return seconds(Work(nbytes / gpu.dense_memory, products=products), gpu)
