"""The error of a block's output while the rounding of its linears is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from compress.checkpoint.weights.integer import IntegerWeight
from compress.methods.base import QuantizationMethod, TunedBlock
from compress.pipeline.block import LoadedBlock
from compress.pipeline.capture import Calibration, Call

Batch = tuple[Tensor, Call, Tensor]
"""Hidden states `[B, L, H]`, the other arguments of the block, and the wanted output `[B, L, H]`."""


@dataclass
class BlockError:
    """The error of one block, as `compress.methods.base.BlockObjective` describes it.

    Attributes:
        block: holds everything but the weights that are learned as it will be stored.
        index: position of the block.
        calibration: the inputs of the block.
        target: `[N, L, H]` on the host, the output of the dense block on the dense model's inputs.
        seed: decides the order of the sequences.
    """

    block: LoadedBlock
    index: int
    calibration: Calibration
    target: Tensor
    device: torch.device
    seed: int = 0

    def tune(
        self,
        method: QuantizationMethod,
        starts: Mapping[str, tuple[Tensor, IntegerWeight]],
        options: Any,
        tick: Callable[[float], None] = lambda _: None,
    ) -> TunedBlock:
        """Let a method learn the weights of the block; see `QuantizationMethod.tune_block`."""
        with torch.enable_grad(), _repeatable(self.device):
            return method.tune_block(self, starts, options, tick)

    def batches(self) -> Iterator[Batch]:
        """Yield micro-batches without end, shuffled anew each time all have been seen."""
        # Every block has its own order, and a resumed run the same.
        generator = torch.Generator().manual_seed((self.seed + self.index) % 2**63)
        inputs = self.calibration.tuning
        if inputs is None:
            raise ValueError("a block is to be tuned, and no inputs were captured for it")
        hidden, targets = inputs.hidden.split(inputs.micro_batch), self.target.split(inputs.micro_batch)
        while True:
            for number in torch.randperm(len(hidden), generator=generator).tolist():
                call, target = inputs.calls[number][self.index], targets[number].to(self.device)
                yield hidden[number].to(self.device), call, target

    def size(self, batch: Batch) -> int:
        """Return the sequences in a micro-batch."""
        return len(batch[0])

    def error(self, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the squared error of the output over the mean square of the target, summed."""
        hidden, call, target = batch
        parameters = {f"{name}.weight": weight.to(hidden.dtype) for name, weight in weights.items()}
        output = functional_call(self.block.module, parameters, (hidden, *call.args), call.kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        return (output.float() - target.float()).square().sum() / target.float().square().mean()

    @torch.no_grad()
    def judge(self, weights: Mapping[str, Tensor]) -> float:
        """Return the mean of the same over the search sequences."""
        search, targets = self.calibration.search, self.target[self.calibration.search_rows]
        parts = zip(search.batches(self.index, self.device), targets.split(search.micro_batch), strict=True)
        total = sum(float(self.error(weights, (*inputs, target.to(self.device)))) for inputs, target in parts)
        return total / targets.numel()


def _repeatable(device: torch.device) -> AbstractContextManager[None]:
    """Attention with gradients that are the same every time: on a GPU the fast kernels add them up in any order."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()
