"""Where and in which dtype a model is computed."""

from __future__ import annotations

import torch

from compress.checkpoint.errors import ToolkitError
from runtime.kernels.cpu import is_fast

DTYPES = ("bfloat16", "float16", "float32", "float64")


def resolve_device(name: str) -> torch.device:
    """The device of that name. Raises ToolkitError when this machine has none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ToolkitError(f"unknown device {name!r}", "Choose auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ToolkitError(f"device {name} asked for, but torch sees {torch.cuda.device_count()}", "Use --device cpu")
    return device


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The activation dtype. Raises ToolkitError for an unknown one, and for one with no fast path on this CPU."""
    if name != "auto" and name not in DTYPES:
        raise ToolkitError(f"unknown dtype {name!r}", f"Choose auto, {', '.join(DTYPES)}")
    wanted = getattr(torch, checkpoint_dtype if name == "auto" else name)
    if device.type != "cpu" or is_fast(wanted):
        return wanted
    if name != "auto":
        raise ToolkitError(f"{name} has no fast path on this CPU (over ten times slower)", "Use --dtype auto")
    return torch.bfloat16 if is_fast(torch.bfloat16) else torch.float32
