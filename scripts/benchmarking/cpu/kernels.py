"""Kernels in C compared with those of PyTorch: linears on one core, and paged attention (`attention`), interleaved.

Times are processor time of the calling thread, so other work on the machine shifts them little; torch and the C pool
get one thread each. Every product takes another copy of its weight, together larger than the caches.

    python scripts/bench_kernels.py cpu
    python scripts/bench_kernels.py cpu --shapes 4096x14336 --rows 1 8 --seconds 5
    python scripts/bench_kernels.py cpu --attention --threads 1 2
    python scripts/bench_kernels.py cpu --prompts
    python scripts/bench_kernels.py cpu --mixture 1024x512x64x10
    python scripts/bench_kernels.py cpu --trellis --shapes 2048x2048 --rows 1 8 64
    python scripts/bench_kernels.py cpu --sampling 128256 --rows 1 8
    python scripts/bench_kernels.py cpu --write-tables --shapes 2048x5632 5632x2048
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from benchmarking.machine import median_ratio, open_console, take_turns
from benchmarking.tables import Row, print_with_markdown
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import Activations as InputRounding
from compress.checkpoint.weights import BlockFp8, Exl3, Fp8, Int, Mxfp8, Scheme, Weight
from compress.checkpoint.weights.coded import Coded, CodedWeight
from compress.checkpoint.weights.exl3 import PAIR_WORDS, TILE, Exl3Weight
from compress.common.errors import ToolkitError
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set, library, set_threads
from runtime.backends.base import Linear, Target
from runtime.backends.cpu import choice
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.torch.linear import PrepackedLinear
from runtime.backends.torch.quantized_linear import INT4PACK

CACHES = 128 * 2**20
"""Bytes of copies of one weight."""
CPU = torch.device("cpu")
TARGET = Target(CPU, torch.bfloat16)
BASELINE = "torch int4pack"


def random_weight(rows: int, columns: int, scheme: Scheme, device: torch.device = CPU) -> Weight:
    if isinstance(scheme, Coded) and not isinstance(scheme, Fp8 | Int):
        return scheme.round(torch.randn(rows, columns, device=device))
    if isinstance(scheme, Exl3):
        tiles = columns // TILE, rows // TILE, scheme.pair_bits * PAIR_WORDS
        codes = torch.randint(-(1 << 15), 1 << 15, tiles, dtype=torch.int16, device=device)
        return Exl3Weight(codes, *(torch.ones(side, device=device).half() for side in (columns, rows)), scheme)
    groups = rows, scheme.num_groups(columns)
    scale = torch.rand(groups, device=device).mul_(0.01).add_(0.001).bfloat16()
    if isinstance(scheme, Fp8):
        return CodedWeight(torch.randn(rows, columns, device=device).to(FP8), scale, scheme)
    codes = torch.randint(0, scheme.max_code + 1, (rows, columns), dtype=torch.uint8, device=device)
    return scheme.weight(codes, scale)


@dataclass(frozen=True, slots=True)
class Contender:
    """Copies of one weight, taken in turns."""

    name: str
    copies: Sequence[Linear]

    def __call__(self, x: Tensor, turn: int) -> Tensor:
        return self.copies[turn % len(self.copies)](x)


def contenders(in_features: int, out_features: int, group_size: int = 128) -> list[Contender]:
    """All ways to multiply by a random weight of a shape."""
    torch.manual_seed(0)
    numbers = torch.randn(out_features, in_features).to(torch.bfloat16)
    w4, w2, w8 = (random_weight(out_features, in_features, Int(bits, group_size)) for bits in (4, 2, 8))
    blocks, groups = (random_weight(out_features, in_features, scheme) for scheme in (BlockFp8(), Mxfp8()))
    w8a8 = random_weight(out_features, in_features, Int(8, None, activations=InputRounding.INT8))
    makers: Mapping[str, Callable[[], Linear]] = {
        "torch bf16": lambda: PrepackedLinear(numbers, None),
        "torch int4pack": lambda: INT4PACK.prepare(w4, None, TARGET),
        "w4a16": lambda: CpuLinear(w4),
        "w4a8": lambda: CpuLinear(w4, activations=Activations.INT8_GROUP),
        "w2a16": lambda: CpuLinear(w2),
        "w8a16": lambda: CpuLinear(w8),
        "fp8 blocks": lambda: CpuLinear(blocks),
        "mxfp8": lambda: CpuLinear(groups),
        "w8a8": lambda: CpuLinear(w8a8, activations=Activations.INT8_ROW),
        "bf16": lambda: CpuLinear(numbers),
    }
    return [copied(name, make) for name, make in makers.items()]


def copied(name: str, make: Callable[[], Linear]) -> Contender:
    """As many copies of a linear as are larger than the caches."""
    first = make()
    return Contender(name, [first, *(make() for _ in range(CACHES // first.nbytes))])


def milliseconds(
    sides: Sequence[Contender], in_features: int, rows: int, seconds: float, baseline: str = BASELINE
) -> tuple[dict[str, float], dict[str, float]]:
    """Processor time per product, and how many times as fast as the baseline each is: medians over turns.

    Args:
        seconds: how long all of it may take; at least three turns are made.

    Returns:
        Milliseconds, and times as fast, by contender.
    """
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    measured = take_turns({side.name: partial(side, x) for side in sides}, seconds)
    speed = {name: median_ratio(measured[baseline], times) for name, times in measured.items()}
    return {name: statistics.median(times) for name, times in measured.items()}, speed


def linear_rows(in_features: int, out_features: int, numbers_of_rows: list[int], seconds: float) -> list[Row]:
    """One line per kernel: milliseconds for each number of rows, and times as fast as the baseline."""
    return product_rows(contenders(in_features, out_features), in_features, numbers_of_rows, seconds)


def product_rows(
    sides: Sequence[Contender],
    in_features: int,
    numbers_of_rows: list[int],
    seconds: float,
    baseline: str = BASELINE,
) -> list[Row]:
    """One line per contender: milliseconds for each number of rows, and times as fast as the baseline."""
    measured = [milliseconds(sides, in_features, rows, seconds, baseline) for rows in numbers_of_rows]
    return [
        {"kernel": side.name}
        | {
            f"M={rows}": f"{times[side.name]:.3f} ({speed[side.name]:.2f}x)"
            for rows, (times, speed) in zip(numbers_of_rows, measured, strict=True)
        }
        for side in sides
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["2048x5632"], help="inputs x outputs of weights")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512], help="tokens per product")
    parser.add_argument("--seconds", type=float, default=4.0, help="per shape and number of rows")
    parser.add_argument("--attention", action="store_true", help="paged attention of a decode step instead of linears")
    parser.add_argument("--sampling", type=int, default=0, metavar="V", help="sampling of V logits instead of linears")
    parser.add_argument("--prompts", action="store_true", help="paged attention of stretches of prompts instead")
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="of attention, one table each")
    parser.add_argument("--mixture", default="", help="hidden x width x experts x chosen: a mixture instead of linears")
    parser.add_argument("--trellis", action="store_true", help="trellis codes (EXL3): search and products")
    parser.add_argument(
        "--write-tables", action="store_true", help="let linears choose tiles, vectors or oneDNN by figures taken now"
    )


def run(options: argparse.Namespace) -> int:
    if library() is None:
        raise ToolkitError("there is nothing to compare", absence())
    console = open_console(180, instructions=INSTRUCTION_SETS[best_instruction_set()])
    if options.attention or options.prompts:
        _print_attention(options, console)
        return 0
    torch.set_num_threads(1)
    set_threads(1)
    if options.mixture:
        from benchmarking.cpu.mixtures import mixture_rows, parse_shape

        mixture = parse_shape(options.mixture)
        rows = mixture_rows(mixture, options.rows, options.seconds)
        print_with_markdown(f"{mixture}: ms of one core, load {os.getloadavg()[0]:.1f}", rows, console)
        return 0
    if options.sampling:
        from benchmarking.cpu.sampling import sampling_rows

        for dtype in (torch.float32, torch.bfloat16):
            found = sampling_rows(options.sampling, options.rows, dtype, options.seconds)
            title = f"{options.sampling} logits in {dtype}: ms of one core per row, torch to compiled"
            print_with_markdown(f"{title}, load {os.getloadavg()[0]:.1f}", found, console)
        return 0
    shapes = [tuple(int(number) for number in shape.split("x")) for shape in options.shapes]
    if options.write_tables:
        from benchmarking.cpu.choice import measure, write_table

        speedups = measure(shapes, options.rows, options.seconds)
        console.print_json(data=speedups)
        console.print(f"written: {write_table(speedups, choice.TABLES)}, load {os.getloadavg()[0]:.1f}")
        return 0
    measure_rows, baseline = linear_rows, BASELINE
    if options.trellis:
        from benchmarking.cpu.trellis import EXPANDED, search_rows, trellis_rows

        print_with_markdown("Search for 256 trellis codes, ms of one core", search_rows(), console)
        measure_rows, baseline = trellis_rows, EXPANDED
    for shape, (in_features, out_features) in zip(options.shapes, shapes, strict=True):
        rows = measure_rows(in_features, out_features, options.rows, options.seconds)
        title = f"{shape}: ms of one core per product (times as fast as {baseline}), load {os.getloadavg()[0]:.1f}"
        print_with_markdown(title, rows, console)
    return 0


def _print_attention(options: argparse.Namespace, console: Console) -> None:
    from benchmarking.cpu.attention import DECODE_CASES, PROMPT_CASES, decode_rows, prompt_rows

    for threads in options.threads:
        where = f"one layer, threads: {threads}"
        if options.attention:
            title = f"A decode step, {where}; share of the stream"
            print_with_markdown(title, decode_rows(DECODE_CASES, threads), console)
        if options.prompts:
            title = f"A stretch of a prompt, {where}; products of a thread, 10^9/s"
            print_with_markdown(title, prompt_rows(PROMPT_CASES, threads), console)
