"""The speed of a device, for estimates of time."""

from __future__ import annotations

import time

import torch


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Measures floating point operations per second of a matrix product, within a fraction of a second."""
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])
    started = time.monotonic()
    float((matrix @ matrix)[0, 0])
    return 2.0 * size**3 / (time.monotonic() - started)
