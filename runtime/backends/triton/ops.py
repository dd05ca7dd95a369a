"""A decoder's ops in Triton, for 16 bits on NVIDIA GPUs: one launch for each row-wise step."""

from __future__ import annotations

from torch import Tensor

from runtime.backends.base import InputForm, finished
from runtime.backends.torch.ops import TorchOps


class TritonOps(TorchOps):
    """See `Ops`. What turns heads is plain torch: where pages are written, `TritonLayers` does it on the way."""

    def __init__(self) -> None:
        from runtime.backends.triton.kernels import norm_act

        self._launch = norm_act

    def add_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        product = None if update is None else finished(update)
        return self._launch.norm(hidden, product, weight, eps, InputForm()).rows

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        return self._launch.gate(finished(gate_up), InputForm(), gate_up.dtype).rows
