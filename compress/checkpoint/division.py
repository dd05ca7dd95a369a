"""Division that is the same on every device."""

from __future__ import annotations

from torch import Tensor


def divide(x: Tensor, number: float) -> Tensor:
    """`x / number`, rounded once. A GPU multiplies by the rounded reciprocal of a number that is in host memory, which
    may be off by one unit (`div_true_kernel_cuda` of PyTorch), so it gets the number there."""
    return x / x.new_full((), number)
