"""Where and in which dtype calibration runs."""

from __future__ import annotations

import torch

from compress.checkpoint.errors import ToolkitError

DTYPES = ("auto", "bfloat16", "float16", "float32")


def pick_device(name: str) -> torch.device:
    """The device a user named; `auto` is the GPU when there is one. Raises ToolkitError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ToolkitError(f"device {name!r} does not exist", "Use --device auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ToolkitError(f"device {name!r} is not supported", "Use --device auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ToolkitError("no CUDA device is available", "Use --device cpu")
    return device


def pick_dtype(name: str, model_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward passes; `auto` is the model's own where the device multiplies it natively, else float32.

    Raises:
        ToolkitError: a dtype that is not offered.
    """
    if name not in DTYPES:
        raise ToolkitError(f"dtype {name!r} is not offered", f"Use --dtype {', '.join(DTYPES)}")
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda" or (model_dtype == "bfloat16" and _has_native_bfloat16()):
        return getattr(torch, model_dtype)
    return torch.float32


def _has_native_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
