"""Linears of whose inputs blocks are multiplied by Hadamard matrices first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor

from runtime.backends.base import Linear
from runtime.backends.triton.kernels.trellis import turn_inputs
from runtime.backends.triton.launcher import BoundKernel


@dataclass(frozen=True)
class TritonTurnedInputs:
    """As `TurnedInputs`, in one launch before the product.

    Attributes:
        scales: float32 `[K]`, one over the root of the order.
        order: of the matrices, from 32 on.
    """

    linear: Linear
    scales: Tensor
    order: int

    @classmethod
    def of(cls, linear: Linear, order: int, inputs: int, device: torch.device) -> TritonTurnedInputs:
        """Prepares a linear with this number of inputs."""
        return cls(linear, torch.full((inputs,), order**-0.5, device=device), order)

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, K] -> [M, N]` in the dtype of `x`, bfloat16 or float16, as are turned inputs."""
        turned = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._turn((len(x), len(self.scales) // self.order), x.contiguous(), turned, len(x))
        return self.linear(turned)

    @cached_property
    def _turn(self) -> BoundKernel:
        inputs, interpreted = len(self.scales), triton.knobs.runtime.interpret
        return turn_inputs.bind(
            scale_ptr=self.scales, K=inputs, PADDED=inputs, TURN=self.order, INTERPRETED=interpreted, num_warps=1
        )
