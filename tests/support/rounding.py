"""Comparisons that ask for the same bits in Triton's interpreter, and allow what the arithmetic of a GPU may round
otherwise.

A GPU fuses products and sums into one rounding, adds in another order and approximates reciprocal square roots and
exponentials. So two kernels, or a kernel and torch, may differ in the last bit of float32; where that decides a
rounding to 16 bits, or to a code, a number differs by a step. That is rare.
"""

import torch
from torch import Tensor

FEW = 0.02
"""Share of numbers that may differ on a GPU; where the scale of a head does, several of its codes do."""


def assert_same_bits(found: Tensor, expected: Tensor, what: object = "", few: float = FEW) -> None:
    """Equality of all numbers in the interpreter, of all but a few on a GPU. All that is not a number is equal."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    share = (bits(found) != bits(expected)).float().mean().item()
    assert share <= (few if found.is_cuda else 0), (what, share)


def bits(numbers: Tensor) -> Tensor:
    """Numbers as integers of their size."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    known = numbers.nan_to_num(777) if numbers.is_floating_point() and numbers.element_size() > 1 else numbers
    return known.contiguous().view(sizes[numbers.element_size()])
