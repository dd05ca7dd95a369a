"""2:4 weights in 16 bits on NVIDIA GPUs, by PyTorch's semi-structured product: sparse tensor cores of Ampere and later.

Half of the values are stored, with two bits for the place of each, and half of the arithmetic is done, from which many
tokens gain. For few tokens others saw it several times slower than a dense product (pytorch issue 111339), and here it
is not measured: so weights are multiplied dense unless this is asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from runtime.backends.base import Target

NAME = "semi_structured"
FIRST_CAPABILITY = (8, 0)
ROW_MULTIPLE, INPUT_MULTIPLE = 32, 64
"""What both of PyTorch's backends (cuSPARSELt and CUTLASS) take, in bfloat16 and in float16."""
TOKEN_MULTIPLE = 8
"""Tokens are filled up to this with zeros."""
KEPT, OF = 2, 4
MULTIPLIED = f"2:4 zeros are multiplied too: few tokens are faster so (--linear-backend {NAME} differs)"


class SemiStructuredLinear:
    """A weight `[O, I]` of which at most two of every four neighbouring inputs are not zero."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from torch.sparse import to_sparse_semi_structured

        self._weight = to_sparse_semi_structured(weight)
        self._bias = bias
        self.nbytes = semi_structured_bytes(*weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        padding = -len(x) % TOKEN_MULTIPLE
        padded = functional.pad(x, (0, 0, 0, padding)) if padding else x
        return functional.linear(padded, self._weight, self._bias)[: len(x)]


def semi_structured_bytes(rows: int, columns: int) -> int:
    """Half of the values in 16 bits, and two bits for the place of each."""
    return rows * columns * 9 // 8


def is_two_of_four(weight: Tensor) -> bool:
    """Whether the zeros of a weight `[O, I]` allow it."""
    return weight.shape[1] % OF == 0 and bool(((weight.view(len(weight), -1, OF) != 0).sum(-1) <= KEPT).all())


@dataclass(frozen=True, slots=True)
class SemiStructuredChoice:
    """Whether a weight in 16 bits is multiplied so, and why or why not: no reason for one that is not 2:4, or on a CPU
    where nobody asked."""

    serves: bool
    reason: str


def choose_semi_structured(weight: Tensor, target: Target, kernels: str) -> SemiStructuredChoice:
    """Decides for a weight `[O, I]`; `kernels` is a name of `runtime.backends.registry.MODES`, or of a kernel."""
    if (target.device.type != "cuda" and kernels != NAME) or not is_two_of_four(weight):
        return SemiStructuredChoice(False, "")
    if refusal := refuse(len(weight), weight.shape[1], target.device, target.dtype):
        return SemiStructuredChoice(False, f"{NAME} {refusal}")
    if kernels == NAME:
        return SemiStructuredChoice(True, "asked for")
    return SemiStructuredChoice(False, MULTIPLIED)


def refuse(out_features: int, in_features: int, device: torch.device, dtype: torch.dtype) -> str:
    """Why a weight `[O, I]` cannot be served so; empty when it can."""
    if device.type != "cuda":
        return "runs on NVIDIA GPUs"
    if dtype not in (torch.bfloat16, torch.float16):
        return "computes in 16 bits"
    if out_features % ROW_MULTIPLE or in_features % INPUT_MULTIPLE:
        return f"takes {ROW_MULTIPLE} rows and {INPUT_MULTIPLE} inputs, or a multiple"
    if _capability(device) < FIRST_CAPABILITY:
        return "needs sparse tensor cores (compute capability 8.0)"
    return ""


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
