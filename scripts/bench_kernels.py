"""Kernels and whole models on one device: CPUs against PyTorch and llama.cpp, GPUs against PyTorch and gemlite.

python scripts/bench_kernels.py cpu --shapes 4096x14336 --rows 1 8 --seconds 5
python scripts/bench_kernels.py cpu --attention
python scripts/bench_kernels.py cpu-models --shape 1.1b --threads 2
python scripts/bench_kernels.py cpu-scaling --shape 1.1b --cores 8 16 32 64 --bandwidth 100 300
python scripts/bench_kernels.py gpu --shapes 8192x8192 --tokens 1 16 256 2048 --rows kernels.jsonl
python scripts/bench_kernels.py gpu-host --forms int4 --rounds 30
python scripts/bench_kernels.py gpu-models --shape 8b --rows models.jsonl
python scripts/bench_kernels.py gpu-serve --rows serve.jsonl
python scripts/bench_kernels.py gpu-models --shape demo --device cpu --short
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarking.commands import run_command
from benchmarking.machine import leave_with

COMMANDS = {
    "cpu": ("cpu.kernels", "linears, or paged attention, compared with PyTorch"),
    "cpu-models": ("cpu.models", "prefill and decode of a model on the CPU, compared with llama.cpp and transformers"),
    "cpu-scaling": (
        "cpu.scaling",
        "linears of a decode step on more cores: measured to what is there, modelled beyond",
    ),
    "gpu": ("gpu.kernels", "linears and attention on a GPU, compared with PyTorch and gemlite"),
    "gpu-host": ("gpu.host", "time of the host for steps on a GPU, without one"),
    "gpu-models": ("gpu.models", "a model dense, int8 and int4 on a GPU, compared with transformers"),
    "gpu-serve": ("gpu.serve", "a model over HTTP, by one client and by many"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(__doc__, COMMANDS, arguments)


if __name__ == "__main__":
    leave_with(main)
