"""The tests' stand-in for a GPU, for scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests/support"))

from jit_without_gpu.builds import Build
from jit_without_gpu.cases import CASES
from jit_without_gpu.own_process import processes_that_compile
from jit_without_gpu.served import serve
from jit_without_gpu.session import A100, H200, Card, gpu_without_hardware

__all__ = [
    "A100",
    "CASES",
    "H200",
    "Build",
    "Card",
    "gpu_without_hardware",
    "processes_that_compile",
    "serve",
]
