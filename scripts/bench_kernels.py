"""Kernels and whole models on one device: on CPUs beside PyTorch and llama.cpp, on a GPU beside PyTorch and gemlite.

python scripts/bench_kernels.py cpu --shapes 4096x14336 --rows 1 8 --seconds 5
python scripts/bench_kernels.py cpu --attention
python scripts/bench_kernels.py cpu-models --shape 1.1b --threads 2
python scripts/bench_kernels.py gpu --shapes 8192x8192 --tokens 1 16 256 2048 --json kernels.json
python scripts/bench_kernels.py gpu-models --shape 8b --json gpu.json --markdown gpu.md
python scripts/bench_kernels.py gpu-models --shape demo --device cpu --short
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarking.commands import run_command
from benchmarking.machine import leave_with

COMMANDS = {
    "cpu": ("cpu_kernels", "linears, or paged attention, on one core, beside PyTorch"),
    "cpu-models": ("cpu_models", "prefill and decode of a model on the CPU, beside llama.cpp and transformers"),
    "gpu": ("gpu_kernels", "linears and attention on a GPU, beside PyTorch and gemlite"),
    "gpu-models": ("gpu_models", "a model dense, int8 and int4 on a GPU, beside transformers"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(__doc__, COMMANDS, arguments)


if __name__ == "__main__":
    leave_with(main)
