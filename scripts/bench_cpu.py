"""The CPU backend: products of single layers, the C kernels beside PyTorch's, on one core.

Example:

    python scripts/bench_cpu.py
    python scripts/bench_cpu.py --shapes 4096x14336 --rows 1 8 --seconds 5
"""

from __future__ import annotations

import argparse
import os

from benchmarking.cpu_linears import BASELINE, contenders, milliseconds
from benchmarking.entry import leave_with
from benchmarking.machine import environment
from benchmarking.tables import Row, describe, print_with_markdown
from rich.console import Console

from compress.common.errors import ToolkitError
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set, library


def linear_rows(in_features: int, out_features: int, numbers_of_rows: list[int], seconds: float) -> list[Row]:
    """One line per kernel: milliseconds for each number of rows, and times as fast as the baseline."""
    sides = contenders(in_features, out_features)
    measured = [milliseconds(sides, in_features, rows, seconds) for rows in numbers_of_rows]
    return [
        {"kernel": side.name}
        | {
            f"M={rows}": f"{times[side.name]:.3f} ({speed[side.name]:.2f}x)"
            for rows, (times, speed) in zip(numbers_of_rows, measured, strict=True)
        }
        for side in sides
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["2048x5632"], help="inputs x outputs of weights")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512], help="tokens per product")
    parser.add_argument("--seconds", type=float, default=4.0, help="per shape and number of rows")
    options = parser.parse_args()
    if library() is None:
        raise ToolkitError("there is nothing to compare", absence())
    console = Console(width=160)
    facts = environment() | {"instructions": INSTRUCTION_SETS[best_instruction_set()]}
    console.print(describe(facts), f"load {os.getloadavg()[0]:.1f}", markup=False)
    for shape in options.shapes:
        in_features, out_features = (int(number) for number in shape.split("x"))
        rows = linear_rows(in_features, out_features, options.rows, options.seconds)
        title = f"{shape}: ms of one core per product (times as fast as {BASELINE}), load {os.getloadavg()[0]:.1f}"
        print_with_markdown(title, rows, console)
    return 0


if __name__ == "__main__":
    leave_with(main)
