"""The device a user names, for compressing and for serving alike."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from compress.checkpoint.errors import ToolkitError


def resolve_device(name: str) -> torch.device:
    """The device of that name; `auto` is the GPU when there is one. Kernels of this thread run there from now on.

    Raises:
        ToolkitError: there is none such.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ToolkitError(f"unknown device {name!r}", "Use --device auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ToolkitError(f"device {name!r} is not supported", "Use --device auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ToolkitError(
            f"device {name} asked for, but torch sees {torch.cuda.device_count()} of them", "Use --device cpu"
        )
    if device.index:
        torch.cuda.set_device(device)
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of Triton run on a GPU inside of this, from any thread. Those of torch run where their tensors are."""
    return torch.cuda.device(device) if device.index else nullcontext()
