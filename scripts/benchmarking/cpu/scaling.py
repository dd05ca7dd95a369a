"""Scaling of a decode step with cores: measured with as many threads as there are cores, modelled beyond.

The linears of a decode step of a model, int4 and one token. A product with T threads takes the longest of

* its chunks, ceil(chunks / T) one after the other, each at the measured speed of one thread, and
* its bytes at the bandwidth of the machine,

and what a job costs besides, measured for two threads and taken to grow with their number. The model is checked where
there are cores, with the bandwidth measured there. Beyond, the bandwidth is what `--bandwidth` says, and no figure is a
measurement. Times are the best of the rounds by the clock: other work on the machine counts.

    python scripts/bench_kernels.py cpu-scaling --shape 1.1b --threads 1 2 --cores 8 16 32 64 --bandwidth 100 300
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarking.cpu.kernels import random_weight
from benchmarking.machine import open_console
from benchmarking.models import SHAPES, Shape
from benchmarking.tables import Row, print_with_markdown
from compress.checkpoint.weights import Int
from compress.common.errors import ToolkitError
from compress.cpu.binding import absence, library, set_threads
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.cpu.weight_layout import TILE

CHUNK_SECONDS = 40e-6
"""Work of a chunk, and how many of them a thread gets at least, as `linear.c` cuts them."""
CHUNKS_PER_THREAD = 2
BITS = 4


@dataclass(frozen=True)
class Product:
    """A product of a step.

    Attributes:
        seconds: with one thread.
        count: how often a step has it.
    """

    out_features: int
    nbytes: int
    seconds: float
    count: int


@dataclass(frozen=True)
class Machine:
    """Threads, memory and cost of a job.

    Attributes:
        bandwidth: bytes a second of all cores together.
        job_seconds: that a job costs besides its chunks, for each thread beyond the first.
    """

    threads: int
    bandwidth: float
    job_seconds: float


def num_chunks(product: Product, threads: int) -> int:
    """Returns into how many chunks `linear.c` cuts a product of one token."""
    tiles = math.ceil(product.out_features / TILE)
    wanted = max(1, int(CHUNK_SECONDS / (product.seconds / tiles)))
    return math.ceil(tiles / min(wanted, math.ceil(tiles / (CHUNKS_PER_THREAD * threads))))


def product_seconds(product: Product, machine: Machine) -> float:
    """Returns the modelled time of one product."""
    chunks = num_chunks(product, machine.threads)
    computing = math.ceil(chunks / machine.threads) / chunks * product.seconds
    return max(computing, product.nbytes / machine.bandwidth) + machine.job_seconds * (machine.threads - 1)


def step_seconds(products: Sequence[Product], machine: Machine) -> float:
    """Returns the modelled time of all products of a step."""
    return sum(product.count * product_seconds(product, machine) for product in products)


def shapes_of(shape: Shape) -> Mapping[tuple[int, int], int]:
    """Returns how often a step has a weight of `[O, I]`."""
    heads = shape.heads + 2 * shape.kv_heads
    return {
        (heads * shape.head_dim, shape.hidden): shape.layers,
        (shape.hidden, shape.heads * shape.head_dim): shape.layers,
        (2 * shape.intermediate, shape.hidden): shape.layers,
        (shape.hidden, shape.intermediate): shape.layers,
        (shape.vocabulary, shape.hidden): 1,
    }


def best_seconds(work: Callable[[], object], rounds: int) -> float:
    """Returns the shortest time of a call."""

    def one() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return min(one() for _ in range(rounds))


class Step:
    """All products of a decode step, each weight as often as the step has it, so that caches keep none."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.counts = shapes_of(shape)
        weights = {sizes: random_weight(*sizes, Int(BITS, 128)) for sizes in self.counts}
        self.linears = {
            sizes: [CpuLinear(weights[sizes]) for _ in range(count)] for sizes, count in self.counts.items()
        }
        self.inputs = {sizes: torch.randn(1, sizes[1]).bfloat16() for sizes in self.counts}

    def run(self, sizes: tuple[int, int]) -> None:
        for linear in self.linears[sizes]:
            linear(self.inputs[sizes])

    def measured(self, threads: int, rounds: int) -> dict[tuple[int, int], float]:
        """Returns seconds of one product of each kind."""
        set_threads(threads)
        return {sizes: best_seconds(lambda: self.run(sizes), rounds) / count for sizes, count in self.counts.items()}  # noqa: B023

    def products(self, seconds: Mapping[tuple[int, int], float]) -> list[Product]:
        return [
            Product(sizes[0], self.linears[sizes][0].nbytes, seconds[sizes], count)
            for sizes, count in self.counts.items()
        ]


def job_seconds(rounds: int) -> float:
    """Returns what a second thread costs a job of little work."""
    small = CpuLinear(random_weight(4 * TILE, 64, Int(BITS, 64)))
    x = torch.randn(1, 64).bfloat16()

    def many() -> None:
        for _ in range(200):
            small(x)

    set_threads(1)
    alone = best_seconds(many, rounds)
    set_threads(2)
    return max(0.0, best_seconds(many, rounds) - alone) / 200


def stream_bandwidth(step: Step, seconds: Mapping[tuple[int, int], float]) -> float:
    """Returns the bytes a second of the fastest product."""
    return max(step.linears[sizes][0].nbytes / seconds[sizes] for sizes in step.counts)


def rows_of(
    step: Step, threads: Sequence[int], cores: Sequence[int], bandwidths: Sequence[float], rounds: int
) -> Iterator[Row]:
    """Yields a row for each number of threads: measured and modelled, or modelled for each bandwidth."""
    alone = step.measured(1, rounds)
    products, barrier = step.products(alone), job_seconds(rounds)
    one = sum(each.count * each.seconds for each in products)
    for count in threads:
        found = step.measured(count, rounds)
        machine = Machine(count, stream_bandwidth(step, found), barrier)
        taken = sum(step.counts[sizes] * seconds for sizes, seconds in found.items())
        yield _row(count, f"{machine.bandwidth / 1e9:.1f}, measured", taken, step_seconds(products, machine), one)
    for gigabytes in bandwidths:
        for count in cores:
            modelled = step_seconds(products, Machine(count, gigabytes * 1e9, barrier))
            yield _row(count, f"{gigabytes:g}, assumed", None, modelled, one)


def _row(threads: int, bandwidth: str, measured: float | None, modelled: float, one: float) -> Row:
    return {
        "threads": str(threads),
        "GB/s": bandwidth,
        "measured, ms": "not measured" if measured is None else f"{measured * 1e3:.2f}",
        "model, ms": f"{modelled * 1e3:.2f}",
        "over one thread": f"{one / (modelled if measured is None else measured):.2f} x",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=[*SHAPES], default="1.1b")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads that are measured")
    parser.add_argument("--cores", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="numbers that are modelled")
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[100, 300], help="GB/s that are assumed for them")
    parser.add_argument("--rounds", type=int, default=10)


def run(options: argparse.Namespace) -> int:
    if library() is None:
        raise ToolkitError("there are no CPU kernels", absence())
    console = open_console(120)
    step = Step(SHAPES[options.shape])
    rows = list(rows_of(step, options.threads, options.cores, options.bandwidth, options.rounds))
    set_threads(0)
    print_with_markdown(f"Linears of a decode step, {options.shape}, int4", rows, console)
    return 0
