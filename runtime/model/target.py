"""In which dtype a model is computed."""

from __future__ import annotations

import torch

from compress.checkpoint.errors import ToolkitError
from runtime.kernels.cpu import is_fast

DTYPES = ("bfloat16", "float16", "float32", "float64")


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
