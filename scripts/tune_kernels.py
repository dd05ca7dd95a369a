"""Measures every configuration of the int4 kernels on this GPU, and writes the table that loading reads.

For each shape and number of tokens the fastest configuration is kept. A configuration that does not compile or does not
fit in shared memory is passed over and counted.

    python scripts/tune_kernels.py --shapes 28672x4096 4096x14336
    python scripts/tune_kernels.py --out table.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarking.cpu_kernels import random_weight
from benchmarking.gpu_kernels import candidates, num_copies, require_gpu, seconds_per_call, triton_errors
from benchmarking.machine import leave_with
from rich.console import Console

from runtime.backends.triton.kernels.configs import BUCKETS, KernelConfig, to_json

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


def timer_of(rows: int, columns: int) -> Timer:
    """On this GPU, for int4 weights in groups of 128."""
    import torch

    from compress.checkpoint.weights import Int
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear
    from runtime.backends.triton.kernels.weight_layout import interleave

    device, scheme = require_gpu(), Int(4, 128)
    first = interleave(random_weight(rows, columns, scheme, device), device)
    others = range(num_copies(first.nbytes) - 1)
    weights = [first, *(interleave(random_weight(rows, columns, scheme, device), device) for _ in others)]

    def time(tokens: int, config: KernelConfig) -> float:
        x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
        linears = [W4A16Linear(weight, None, dict.fromkeys(BUCKETS, config)) for weight in weights]
        return seconds_per_call([lambda linear=linear: linear(x) for linear in linears])

    return time


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=("6144x4096", "4096x4096", "28672x4096", "4096x14336"))
    parser.add_argument("--tokens", nargs="+", type=int, default=BUCKETS, choices=BUCKETS)
    parser.add_argument("--out", type=Path, help="default: the package's own table for this GPU")
    options, console = parser.parse_args(arguments), Console(width=160, highlight=False)
    require_gpu()
    import torch

    from runtime.backends.measured import table_path
    from runtime.backends.triton.linear import TABLES

    gpu = torch.cuda.get_device_name()
    out = options.out or table_path(TABLES, gpu)
    out.parent.mkdir(parents=True, exist_ok=True)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    timers = {(rows, columns): timer_of(rows, columns) for rows, columns in shapes}
    found: dict[tuple[int, int], dict[int, KernelConfig]] = {}
    for tokens in sorted(options.tokens, key=lambda each: (*IMPORTANT, each).index(each)):
        for shape, timer in timers.items():
            config, refused = tune(tokens, timer)
            console.print(f"{shape} {tokens}: {config}; {refused} configurations could not run")
            if config is not None:
                found.setdefault(shape, {})[tokens] = config
                out.write_text(to_json(gpu, found), encoding="utf-8")
    console.print(f"written: {out}")
    return 0


if __name__ == "__main__":
    leave_with(main)
