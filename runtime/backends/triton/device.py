"""GPUs as Triton kernels see them: which one a device is, and whether it is new enough."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from compress.common.errors import ToolkitError
from runtime.backends.measured import Speedups, Verdict, judge, measured_gpu, read_speedups, table_path

FIRST_CAPABILITY = (8, 0)
"""Ampere: asynchronous copies, bfloat16 and 8-bit products on tensor cores."""
NATIVE_CAPABILITY = (8, 9)
"""Compute capability since which GPUs multiply 8-bit floats: Ada and Hopper."""

HOPPER = (9, 0)
"""Products of warpgroups; kernels that start before those ahead of them have ended."""
CHECKED = Path(__file__).parent / "checked"
"""Records of the GPUs on which overlapping kernels passed `scripts/gpu_check.sh overlap`, one file each, named after
it: `{"device": name, "capability": [major, minor], ...}`. None has been written yet."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU as its driver describes it.

    Attributes:
        processors: number of multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    processors: int


def gpu_of(device: torch.device) -> Gpu | None:
    """Describes the GPU of a device; None for another device, and for a GPU that is not there."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.name, (found.major, found.minor), found.multi_processor_count)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def gpu_name(device: torch.device) -> str:
    """Name that the driver gives a GPU; empty where there is none."""
    gpu = gpu_of(device)
    return "" if gpu is None else gpu.name


def judge_on_gpu(folder: Path, device: torch.device, scheme: str, in_features: int) -> Verdict:
    """Judges by the table of a GPU in a folder, or by that of another one of its compute capability; see `judge`."""
    gpu = gpu_of(device)
    speedups, other = ({}, "") if gpu is None else gpu_speedups(folder, gpu)
    return judge(speedups, scheme, in_features, device=other)


@cache
def gpu_speedups(folder: Path, gpu: Gpu) -> tuple[Speedups, str]:
    """Reads the speed-ups that hold for a GPU, and whose they are where it is another one."""
    found = measured_gpu(folder, gpu.name, gpu.capability)
    return read_speedups(table_path(folder, found), found), "" if found == gpu.name else found


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter runs one program after the other."""
    gpu = gpu_of(device)
    return 1 if gpu is None else gpu.processors


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU; one that is not there, and only planned for, is one."""
    return device.type == "cuda" or gpu_of(device) is not None


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a GPU has a compute capability; one that is not there, and only planned for, is taken to."""
    gpu = gpu_of(device)
    return gpu is None or gpu.capability >= least


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floats itself; one that is not there, and only planned for, is taken to."""
    return is_gpu(device) and has_capability(device, NATIVE_CAPABILITY)


def overlaps_kernels(device: torch.device, asked: str) -> bool:
    """Whether kernels of a GPU start before those ahead of them have ended (programmatic dependent launch).

    Args:
        asked: "on", "off", or "auto": where that has passed its check on a GPU of this compute capability.

    Raises:
        ToolkitError: it is asked for on a device that cannot.
    """
    gpu = gpu_of(device)
    can = gpu is not None and gpu.capability >= HOPPER
    if asked == "on" and not can:
        raise ToolkitError(
            f"kernels cannot overlap on {device if gpu is None else gpu.name}: that takes compute capability 9.0",
            "Leave out --programmatic-launch",
        )
    if gpu is None or not can or asked == "off":
        return False
    return asked == "on" or bool(measured_gpu(CHECKED, gpu.name, gpu.capability))


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Why no Triton kernel of a model serves a dtype on a device; empty where they may."""
    if reason := device_unsupported_reason(device):
        return reason
    return "" if dtype in (torch.bfloat16, torch.float16) else "computes in 16 bits"


def device_unsupported_reason(device: torch.device) -> str:
    """Why no Triton kernel runs on a device; empty where they may."""
    if not is_gpu(device):
        return "runs on NVIDIA GPUs"
    if not has_triton():
        return "needs Triton"
    if not has_capability(device, FIRST_CAPABILITY):
        return f"needs a GPU of compute capability {FIRST_CAPABILITY[0]}.{FIRST_CAPABILITY[1]} or newer"
    return ""
