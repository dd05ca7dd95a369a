"""What each transformer block receives: hidden states kept as numbers, everything else replayed as it was passed.

The model's own forward runs once over its embedding with recorders in place of the blocks. So rotary embeddings, masks
and whatever else a family passes to its blocks come from the family's own code, and no forward pass is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.errors import NumericsError
from compress.checkpoint.source import TensorFiles
from compress.pipeline.blocks import fill, release
from compress.pipeline.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one block for one micro-batch, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class BlockInputs:
    """Calibration on its way through the model.

    Attributes:
        hidden: `[N, L, H]` on the host, input of the next block, in the dtype of computation.
        calls: for each micro-batch the arguments of every block; equal ones are the same object.
        micro_batch: sequences that run at once.
    """

    hidden: Tensor
    calls: list[list[Call]]
    micro_batch: int

    def batches(self, index: int, device: torch.device) -> Iterator[tuple[Tensor, Call]]:
        """Hidden states `[B, L, H]` on `device` and the arguments of block `index`, micro-batch by micro-batch."""
        for hidden, calls in zip(self.hidden.split(self.micro_batch), self.calls, strict=True):
            yield hidden.to(device), calls[index]


def run_block(module: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """A block's output `[B, L, H]`; families that return a tuple put it first."""
    output = module(hidden, *call.args, **call.kwargs)
    return output if isinstance(output, Tensor) else output[0]


def run_all(
    module: nn.Module,
    name: str,
    inputs: BlockInputs,
    index: int,
    device: torch.device,
    tick: Callable[[float], None] = lambda _: None,
) -> Tensor:
    """The block's output `[N, L, H]` on the host, for all of the calibration.

    Args:
        tick: told the share of the calibration that has passed.

    Raises:
        NumericsError: NaN or infinity in the output.
    """
    outputs = torch.empty_like(inputs.hidden)
    for begin, (hidden, call) in zip(
        range(0, len(outputs), inputs.micro_batch), inputs.batches(index, device), strict=True
    ):
        tick(begin / len(outputs))
        outputs[begin : begin + len(hidden)] = run_block(module, hidden, call)
    if not torch.isfinite(outputs.sum(dtype=torch.float64)):
        bad = int((~torch.isfinite(outputs)).sum())
        raise NumericsError(
            f"the output of {name} holds {bad} NaN or infinite values among {outputs.numel()}",
            "Run with --dtype float32, or check the source model: it may overflow in 16 bits",
        )
    return outputs


def capture_inputs(
    skeleton: Skeleton,
    files: TensorFiles,
    tokens: Tensor,
    micro_batch: int,
    device: torch.device,
    dtype: torch.dtype,
    embedding: Tensor | None = None,
) -> BlockInputs:
    """Runs the embedding over `tokens [N, L]` and records what every block is passed.

    Args:
        embedding: `[V, H]`, looked up in place of the stored one.

    Raises:
        CheckpointError: an embedding tensor is missing or misshapen.
        NumericsError: it holds NaN or infinity.
    """
    trunk = skeleton.model.get_submodule(skeleton.architecture.blocks.rpartition(".")[0])
    recorders = _stand_in(skeleton)
    try:
        _fill_outside(skeleton, trunk, files, device, dtype)
        if embedding is not None:
            looked_up = skeleton.model.get_submodule(skeleton.architecture.embedding).get_parameter("weight")
            looked_up.data = embedding.to(device, dtype)
        hidden: list[Tensor] = []
        calls: list[list[Call]] = []
        for batch in tokens.split(micro_batch):
            recorded = _record(trunk, recorders, batch.to(device))
            hidden.append(recorders[0].hidden.cpu())
            calls.append([_shared(call, first) for call, first in zip(recorded, (calls or [recorded])[0], strict=True)])
    finally:
        _stand_back(skeleton, recorders)
        for child in _outside(skeleton, trunk).values():
            release(child)
    return BlockInputs(torch.cat(hidden), calls, micro_batch)


class StandIn(nn.Module):
    """Stands where a block stood, and looks like the block to whoever asks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class _Recorder(StandIn):
    """Keeps what it is passed."""

    hidden: Tensor
    call: Call

    def __init__(self, block: nn.Module, is_last: bool) -> None:
        super().__init__(block)
        self.is_last = is_last

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        self.hidden, self.call = hidden, Call(args[1:], kwargs)
        if self.is_last:
            raise _AllRecorded
        return hidden


class _AllRecorded(Exception):  # noqa: N818 - a signal that ends the forward pass, not an error
    pass


def _stand_in(skeleton: Skeleton) -> list[_Recorder]:
    blocks = skeleton.blocks
    recorders = [_Recorder(block, block is blocks[-1]) for block in blocks]
    for index, recorder in enumerate(recorders):
        blocks[index] = recorder
    return recorders


def _stand_back(skeleton: Skeleton, recorders: list[_Recorder]) -> None:
    for index, recorder in enumerate(recorders):
        skeleton.blocks[index] = recorder.block


@torch.no_grad()
def _record(trunk: nn.Module, recorders: list[_Recorder], tokens: Tensor) -> list[Call]:
    with suppress(_AllRecorded):
        trunk(input_ids=tokens, use_cache=False)
    return [recorder.call for recorder in recorders]


def _outside(skeleton: Skeleton, trunk: nn.Module) -> dict[str, nn.Module]:
    """The trunk's children beside the blocks, by full name."""
    prefix = skeleton.architecture.blocks.rpartition(".")[0]
    return {f"{prefix}.{name}": child for name, child in trunk.named_children() if child is not skeleton.blocks}


def _fill_outside(
    skeleton: Skeleton, trunk: nn.Module, files: TensorFiles, device: torch.device, dtype: torch.dtype
) -> None:
    for name, child in _outside(skeleton, trunk).items():
        fill(child, name, files, device, dtype)


def _shared(call: Call, first: Call) -> Call:
    """The first micro-batch's arguments where these are equal, so that they are kept once."""
    return first if _equal(call.args, first.args) and _equal(call.kwargs, first.kwargs) else call


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return type(left) is type(right) and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return left is right or left == right
