"""What a decoder computes between its linears: norms, rotary embedding, gating. Here in plain torch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from runtime.core.rope import rotate


class Ops(Protocol):
    """One way to compute it. 16-bit numbers are rounded where transformers rounds them, so that models give the same
    bits, but for sums that are added in another order."""

    def add_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `update [T, H]` to `hidden [T, H]` in place; returns the RMSNorm of that, a new tensor."""
        ...

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """RMSNorm with `weight [heads, D]` of every head, if there is one, then the rotary embedding by cosine and
        signed sine `[T, 1, D]`. May change `heads [T, heads, D]` in place and return them."""
        ...

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up [T, I]` of both side by side, `[T, 2 * I]`."""
        ...


class TorchOps:
    """Any dtype and device; the oracle of the others."""

    def add_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if update is not None:
            hidden += update
        return rms_norm(hidden, weight, eps)

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(heads if weight is None else rms_norm(heads, weight, eps), cos, sin)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension. 16-bit input is normalized in float32, rounded, and then multiplied by the
    weight."""
    return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
