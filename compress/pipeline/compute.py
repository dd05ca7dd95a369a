"""In which dtype calibration runs."""

from __future__ import annotations

import torch

from compress.checkpoint.errors import ToolkitError

DTYPES = ("auto", "bfloat16", "float16", "float32")


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
