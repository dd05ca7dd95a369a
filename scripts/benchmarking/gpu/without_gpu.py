"""The tests' stand-in for a GPU, for scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests/support"))

from jit_without_gpu.builds import Build
from jit_without_gpu.cases import CASES, FORMS
from jit_without_gpu.decoders import decodes, make_decoder, make_runner, prompts
from jit_without_gpu.own_process import processes_that_compile
from jit_without_gpu.served import Served, serve
from jit_without_gpu.session import A100, H200, Card, gpu_without_hardware

__all__ = [
    "A100",
    "CASES",
    "FORMS",
    "H200",
    "Build",
    "Card",
    "Served",
    "decodes",
    "gpu_without_hardware",
    "make_decoder",
    "make_runner",
    "processes_that_compile",
    "prompts",
    "serve",
]
