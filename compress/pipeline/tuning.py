"""Learned rounding of a block: all its linears together, by the block's output.

What is aimed at is the output of the dense block on the dense model's own inputs, from inputs that come from the blocks
before as they are packed: so a block also makes up for the errors of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from compress.methods.shared.learned_rounding import LearnedRounding, learn
from compress.pipeline.block import LoadedBlock, TuningRecord
from compress.pipeline.capture import Calibration, Call
from compress.recipe import Tuning

KEPT_START = "gptq: learning did not lower the error of the block"


@dataclass
class BlockTuning:
    """The work on one block.

    Attributes:
        block: holds the start of what is learned, and the rest as it will be stored.
        index: which block.
        calibration: what enters the block.
        aim: `[N, L, H]` on the host, what should leave it.
        weights: what is learned, by name inside the block.
        seed: decides the order of the sequences.
    """

    block: LoadedBlock
    index: int
    calibration: Calibration
    aim: Tensor
    weights: Mapping[str, LearnedRounding]
    device: torch.device
    seed: int = 0

    def run(self, options: Tuning, tick: Callable[[float], None] = lambda _: None) -> TuningRecord:
        """Learns in place.

        Args:
            tick: told the share of the steps that are taken.
        """
        starts = {name: weight.codes() for name, weight in self.weights.items()}
        parts = self._endless_parts()

        def backward(_step: int) -> None:
            sequences = 0
            while sequences < options.batch:
                hidden, call, aim = next(parts)
                sequences += len(hidden)
                self._error(hidden, call, aim).backward()

        with torch.enable_grad(), _repeatable(self.device):
            learned = learn(
                list(self.weights.values()),
                backward,
                self._judge,
                options.steps,
                options.first_rate,
                lambda step: tick(step / options.steps),
            )
        changed = sum(int((weight.codes().codes != starts[name].codes).sum()) for name, weight in self.weights.items())
        total = sum(start.codes.numel() for start in starts.values())
        return TuningRecord(options.steps, learned.step, learned.loss_before, learned.loss_after, changed / total)

    def _endless_parts(self) -> Iterator[tuple[Tensor, Call, Tensor]]:
        """Micro-batches `[B, L, H]` with the block's arguments and aim, shuffled anew each time all have been seen."""
        # Every block has its own order, and a resumed run the same.
        generator = torch.Generator().manual_seed((self.seed + self.index) % 2**63)
        inputs = self.calibration.tuning
        if inputs is None:
            raise ValueError("a block is to be tuned, and no inputs were captured for it")
        hidden, aims = inputs.hidden.split(inputs.micro_batch), self.aim.split(inputs.micro_batch)
        while True:
            for number in torch.randperm(len(hidden), generator=generator).tolist():
                yield hidden[number].to(self.device), inputs.calls[number][self.index], aims[number].to(self.device)

    def _error(self, hidden: Tensor, call: Call, aim: Tensor) -> Tensor:
        """Squared error of the block's output, token by token in relation to the mean square of the aim, summed."""
        weights = {f"{name}.weight": weight.values().to(hidden.dtype) for name, weight in self.weights.items()}
        output = functional_call(self.block.module, weights, (hidden, *call.args), call.kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        return (output.float() - aim.float()).square().sum() / aim.float().square().mean()

    @torch.no_grad()
    def _judge(self) -> float:
        """Mean of the same over the search sequences."""
        search, aims = self.calibration.search, self.aim[self.calibration.search_rows]
        total = 0.0
        for (hidden, call), aim in zip(
            search.batches(self.index, self.device), aims.split(search.micro_batch), strict=True
        ):
            total += float(self._error(hidden, call, aim.to(self.device)))
        return total / aims.numel()


def _repeatable(device: torch.device) -> AbstractContextManager[None]:
    """Attention whose gradients come out the same every time: on a GPU the fast kernels add them up in any order."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()
