"""Guards shared by the methods: numbers that cannot be quantized are refused, never carried along."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.errors import NumericsError


def require_finite(tensor: Tensor, what: str) -> None:
    """Raises NumericsError when `tensor` holds NaN or infinity; `what` names it in the message."""
    # A sum is finite only when every term is; it is cheaper than a mask, which is built only to count.
    if torch.isfinite(tensor.float().sum()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise NumericsError(
            f"{what} holds {bad} NaN or infinite values of {tensor.numel()}",
            "Check the source checkpoint; a module that is broken there can be left out with --ignore",
        )
