"""The device a user names, for compressing and for serving alike."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from compress.common.errors import CheckpointError, NumericsError, ToolkitError

DEVICES = "auto", "cpu", "cuda"


def resolve_device(name: str) -> torch.device:
    """The device of that name; `auto` is the GPU when there is one. Kernels of this thread run there from now on.
    Raises ToolkitError: the device does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ToolkitError.unknown("device", name, DEVICES, "Use --device") from error
    if device.type not in DEVICES:
        raise ToolkitError.unknown("device", name, DEVICES, "Use --device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ToolkitError(
            f"device {name} asked for, but torch sees {torch.cuda.device_count()} of them", "Use --device cpu"
        )
    if device.index:
        torch.cuda.set_device(device)
    return device


def resolve_devices(names: str) -> tuple[torch.device, ...]:
    """Returns the devices of a list separated by commas; `cpu` may be in it several times. Raises ToolkitError: a
    device does not exist, a GPU is named twice, or the devices are of several kinds."""
    found = tuple(resolve_device(name.strip()) for name in names.split(","))
    if len(found) == 1:
        return found
    found = tuple(torch.device(each.type, each.index or 0) if each.type == "cuda" else each for each in found)
    if len({each.type for each in found}) > 1:
        problem = f"devices {names} are of several kinds, which round differently"
        raise ToolkitError(problem, "Use --devices with GPUs only, or with cpu only")
    if found[0].type == "cuda" and len(set(found)) < len(found):
        raise ToolkitError(f"devices {names} name a GPU twice", "Use --devices with each GPU once")
    if found[0].type == "cuda":
        torch.cuda.set_device(found[0])
    return found


def open_in_thread(name: str) -> None:
    """Lets a GPU get ready, which takes its driver some tenths of a second, while this thread does something else.
    The first use of the device waits for that, and raises its error."""
    thread = ThreadPoolExecutor(1, "device")
    thread.submit(lambda: torch.empty(1, device=resolve_device(name)))
    thread.shutdown(wait=False)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of Triton run on a GPU inside of this, from any thread. Those of torch run where their tensors are."""
    return torch.cuda.device(device) if device.index else nullcontext()


def divide(x: Tensor, number: float) -> Tensor:
    """`x / number`, rounded once. A GPU multiplies by the rounded reciprocal of a number that is in host memory, which
    may be off by one unit (`div_true_kernel_cuda` of PyTorch), so it gets the number there."""
    return x / x.new_full((), number)


_PANEL_ELEMENTS = 1 << 15
"""Numbers that are checked at one time on a CPU: a copy stays in its cache, and PyTorch takes one thread, which
waits for no other where cores are busy."""


def count_nonfinite(tensor: Tensor) -> int:
    """Returns how many numbers of `tensor` are NaN or infinite, without a copy of it."""
    if not tensor.is_floating_point():
        return 0
    panels = (tensor,) if tensor.is_cuda else tensor.reshape(-1).split(_PANEL_ELEMENTS)
    return sum(_count_nonfinite(each if each.dtype == torch.float64 else each.float()) for each in panels)


def _count_nonfinite(numbers: Tensor) -> int:
    # A sum is finite only when every term is; it is cheaper than a mask, which is built only to count.
    return 0 if torch.isfinite(numbers.sum()) else int((~torch.isfinite(numbers)).sum())


def require_finite(tensor: Tensor, what: str) -> None:
    """Raises NumericsError when `tensor` holds NaN or infinity; `what` names it in the message."""
    if bad := count_nonfinite(tensor):
        raise NumericsError(
            f"{what} holds {bad} NaN or infinite values of {tensor.numel()}",
            "Check the source checkpoint; a module that is broken there can be left out with --ignore",
        )


def available_bytes(device: torch.device) -> int:
    """Memory that can be allocated now: of the GPU, or of the machine (what its page cache would give up included)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def total_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None for another device."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def require_memory(what: str, needed: int, device: torch.device, remedy: str) -> None:
    """Raises CheckpointError where `what` takes more bytes than can be allocated: the system would kill the process."""
    available = available_bytes(device)
    if needed > available:
        free = f"{format_bytes(available)} are free on {device}"
        raise CheckpointError(f"{what}, about {format_bytes(needed)}, and {free}", remedy)


def format_bytes(count: int) -> str:
    """`12.3 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
