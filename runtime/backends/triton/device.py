"""Where Triton kernels run: the one place that knows which devices and dtypes they are for. Does not import Triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

FIRST_CAPABILITY = (8, 0)
"""Ampere: asynchronous copies, bfloat16 and 8-bit products on tensor cores."""


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a GPU has a compute capability; one that is not there, and only planned for, is taken to."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= least


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Why no Triton kernel of a model serves a dtype on a device; empty where they may."""
    if reason := device_unsupported_reason(device):
        return reason
    return "" if dtype in (torch.bfloat16, torch.float16) else "computes in 16 bits"


def device_unsupported_reason(device: torch.device) -> str:
    """Why no Triton kernel runs on a device; empty where they may."""
    if device.type != "cuda":
        return "runs on NVIDIA GPUs"
    if not has_triton():
        return "needs Triton"
    if not has_capability(device, FIRST_CAPABILITY):
        return f"needs a GPU of compute capability {FIRST_CAPABILITY[0]}.{FIRST_CAPABILITY[1]} or newer"
    return ""
