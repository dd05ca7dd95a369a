"""Measures every configuration of the int4 kernels on this GPU, and writes the table that loading reads.

For each shape and number of tokens the fastest configuration is kept. A configuration that does not compile or does not
fit in shared memory is passed over and counted.

    python scripts/tune_kernels.py --shapes 28672x4096 4096x14336
    python scripts/tune_kernels.py --out table.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from benchmarking.cpu.kernels import random_weight
from benchmarking.gpu.ahead import compile_ahead, triton_errors
from benchmarking.gpu.kernels import candidates
from benchmarking.gpu.timing import num_copies, require_gpu, seconds_per_call
from benchmarking.machine import leave_with
from rich.console import Console
from torch import Tensor

from compress.checkpoint.weights import Int
from runtime.backends.measured import table_path
from runtime.backends.triton.kernels.configs import BUCKETS, KernelConfig, to_json
from runtime.backends.triton.kernels.w4a16 import W4A16Linear
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, interleave
from runtime.backends.triton.linear import TABLES

Timer = Callable[[int, KernelConfig], float]
"""Seconds for a number of tokens; raises RuntimeError, or an error of Triton, where a configuration cannot run."""
IMPORTANT = (1, 16, 64, 256, 8, 2048)
"""Numbers of tokens that are measured first: the run may be cut off."""


def tune(tokens: int, timer: Timer) -> tuple[KernelConfig | None, int]:
    """Returns the fastest configuration for a number of tokens, if any can run, and how many cannot."""
    times: dict[KernelConfig, float] = {}
    refused = 0
    for config in candidates(tokens):
        try:
            times[config] = timer(tokens, config)
        except (RuntimeError, *triton_errors()):
            refused += 1
    return min(times, key=lambda config: times[config], default=None), refused


@dataclass(frozen=True)
class Copies:
    """Copies of one int4 weight that together exceed the cache, so that reading them in turn misses it."""

    weights: Sequence[InterleavedWeight]

    @classmethod
    def of(cls, rows: int, columns: int, device: torch.device) -> Copies:
        """Random codes in groups of 128."""
        first = interleave(random_weight(rows, columns, Int(4, 128), device), device)
        others = range(num_copies(first.nbytes) - 1)
        return cls([first, *(interleave(random_weight(rows, columns, Int(4, 128), device), device) for _ in others)])

    def calls(self, tokens: int, config: KernelConfig) -> list[Callable[[], Tensor]]:
        """Products of each weight in a configuration."""
        x = torch.randn(tokens, self.weights[0].shape[1], device=self.weights[0].words.device, dtype=torch.bfloat16)
        linears = [W4A16Linear(weight, None, dict.fromkeys(BUCKETS, config)) for weight in self.weights]
        return [partial(linear, x) for linear in linears]

    def time(self, tokens: int, config: KernelConfig) -> float:
        return seconds_per_call(self.calls(tokens, config))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=("6144x4096", "4096x4096", "28672x4096", "4096x14336"))
    parser.add_argument("--tokens", nargs="+", type=int, default=BUCKETS, choices=BUCKETS)
    parser.add_argument("--out", type=Path, help="default: the package's own table for this GPU")
    options, console = parser.parse_args(arguments), Console(width=160, highlight=False)
    device = require_gpu()
    gpu = torch.cuda.get_device_name()
    out = options.out or table_path(TABLES, gpu)
    out.parent.mkdir(parents=True, exist_ok=True)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    copies = {(rows, columns): Copies.of(rows, columns, device) for rows, columns in shapes}
    found: dict[tuple[int, int], dict[int, KernelConfig]] = {}
    for tokens in sorted(options.tokens, key=lambda each: (*IMPORTANT, each).index(each)):
        tried = product(copies.values(), candidates(tokens))
        compile_ahead([each.calls(tokens, config)[0] for each, config in tried], device)
        for shape, each in copies.items():
            config, refused = tune(tokens, each.time)
            console.print(f"{shape} {tokens}: {config}; {refused} configurations could not run")
            if config is not None:
                found.setdefault(shape, {})[tokens] = config
                out.write_text(to_json(gpu, found), encoding="utf-8")
    console.print(f"written: {out}")
    return 0


if __name__ == "__main__":
    leave_with(main)
