"""Norms, rotary embedding, gating and sampling in plain torch: any dtype and device, the oracle of other backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from runtime.core.rope import rotate
from runtime.core.sampling_tensors import RowNoise


class TorchOps:
    """Any dtype and device; the oracle of the others."""

    def add_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if update is not None:
            hidden += update
        return rms_norm(hidden, weight, eps)

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(heads if weight is None else rms_norm(heads, weight, eps), cos, sin)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        return activate_multiply(gate_up, "silu")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension. 16-bit input is normalized in float32, rounded, and then multiplied by the
    weight."""
    return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def activate_multiply(gate_up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up [T, I]` of both side by side, `[T, 2 * I]`, in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(up)


class TorchSampling:
    """Argmax of scores in any dtype and on any device, with Gumbel noise of the whole vocabulary in memory."""

    def unsupported_reason(self, scores: Tensor) -> str:
        return ""

    def argmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.argmax(-1), scores.sum(-1).isfinite()  # a sum is finite only if all of its terms are

    def gumbel_argmax(self, scores: Tensor, noise: RowNoise) -> Tensor:
        return noise.gumbel_argmax(scores, torch.arange(scores.shape[-1], device=scores.device).unsqueeze(0))
