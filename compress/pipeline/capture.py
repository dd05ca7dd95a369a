"""Inputs of each transformer block: hidden states, and all other arguments as passed by the model.

The model's own forward runs once over its embedding with recorders in place of the blocks. Rotary embeddings, masks
and other arguments of blocks therefore come from the family's own code, and no forward pass is reimplemented here.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.checkpoint.reader import NONSENSE
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import CheckpointError, NumericsError, is_out_of_memory
from compress.common.workers import Worker, Workers, moved
from compress.methods.base import fallback
from compress.pipeline.block import LoadedBlock, fill, release
from compress.pipeline.expert_inputs import TOKENS_PER_CHANNEL
from compress.pipeline.skeleton import Skeleton

PASSED = "prev_topk_indices"
"""Argument that passes further outputs of one block to the next; replaced by a store."""
NUM_PARTS = 8
"""Parts of the calibration whose statistics are summed separately, and then in order. A constant, because sums must not
depend on the number of devices. At most as many devices share the statistics of a block."""


def cannot_calibrate(reason: str) -> CheckpointError:
    """Builds the error for modeling code whose blocks cannot be run one at a time."""
    return CheckpointError(
        f"the blocks of this model cannot be run one at a time ({' '.join(reason.split())})",
        f"Use a method without calibration: --method {fallback('quantize').name}",
    )


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one block for one micro-batch, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, device: torch.device) -> Call:
        """Returns the same arguments on `device`; a store stays the object that other blocks read."""
        there = Call(moved(self.args, device), moved(self.kwargs, device))
        for name, value in self.kwargs.items():
            if isinstance(value, UserDict):
                value.data, there.kwargs[name] = there.kwargs[name].data, value
        return there

    def run(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        """Returns a block's output `[B, L, H]`; families that return a tuple put it first. Raises CheckpointError:
        modeling code that needs more than hidden states and the recorded arguments."""
        try:
            return self._output(block, hidden)
        except NONSENSE as error:
            if is_out_of_memory(error):
                raise
            raise cannot_calibrate(f"a block fails: {type(error).__name__}: {error}") from error

    def _output(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        store = self.kwargs.get(PASSED)
        if store is None:
            output = block(hidden, *self.args, **self.kwargs)
            return output if isinstance(output, Tensor) else output[0]
        (before,) = store.get(PASSED, (None,))
        output, passed = block(hidden, *self.args, **self.kwargs | {PASSED: before})
        store[PASSED] = (passed,)
        return cast(Tensor, output)


@dataclass
class BlockInputs:
    """Calibration inputs of the current block.

    Attributes:
        hidden: `[N, L, H]` on the host, input of the next block, in the dtype of computation.
        calls: arguments of every block per micro-batch; equal ones are the same object.
        tokens_per_channel: minimum tokens per channel of the statistics of experts.
    """

    hidden: Tensor
    calls: list[list[Call]]
    micro_batch: int
    tokens_per_channel: int = TOKENS_PER_CHANNEL

    def batches(
        self, index: int, device: torch.device, numbers: Iterable[int] | None = None
    ) -> Iterator[tuple[Tensor, Call]]:
        """Yields hidden states `[B, L, H]` and arguments of block `index` on `device`, for these micro-batches; None is
        all."""
        for number in range(len(self.calls)) if numbers is None else numbers:
            yield self.hidden[self.rows(number)].to(device), self.calls[number][index].on(device)

    def rows(self, number: int) -> slice:
        """Returns the sequences of a micro-batch."""
        return slice(number * self.micro_batch, (number + 1) * self.micro_batch)

    def parts(self) -> list[range]:
        """Returns the micro-batches of each part of the calibration."""
        count, parts = len(self.calls), min(NUM_PARTS, len(self.calls))
        return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]

    def passed_on(self) -> dict[str, Tensor]:
        """Returns outputs other than hidden states that earlier blocks pass to later ones, `[N, ...]` on the host: keys
        and values that layers share, or the tokens that a layer selected."""
        stores = [store_of(calls) for calls in self.calls]
        names = [(kind, part) for kind, parts in (stores[0] or {}).items() for part in range(len(parts))]
        return {
            f"{kind}.{part}": torch.cat([store[kind][part].cpu() for store in stores if store is not None])
            for kind, part in names
        }

    def pass_on(self, passed: Mapping[str, Tensor], device: torch.device) -> None:
        """Stores these outputs where later blocks read them."""
        for name, tensor in passed.items():
            kind, _, part = name.rpartition(".")
            for calls, rows in zip(self.calls, tensor.split(self.micro_batch), strict=True):
                store = store_of(calls)
                if store is not None:
                    store[kind] = (*store.get(kind, ())[: int(part)], rows.to(device))


def store_of(calls: list[Call]) -> UserDict[str, tuple[Tensor, ...]] | None:
    """Returns the store in which the blocks of a micro-batch pass outputs to later ones."""
    values = (value for call in calls for value in call.kwargs.values())
    return next((value for value in values if isinstance(value, UserDict)), None)


@dataclass
class Calibration:
    """Calibration data, and its subset for searches.

    Attributes:
        search: inputs of the search sequences; their hidden states are rows of `inputs.hidden`.
        search_rows: indices of these rows.
        tuning: inputs of all sequences in micro-batches of at most one learning step; None without learning.
        reference: `[N, L, H]`, input of the block in the dense model; None if not needed.
    """

    inputs: BlockInputs
    search: BlockInputs
    search_rows: Tensor
    tuning: BlockInputs | None = None
    reference: Tensor | None = None

    def advance(self, hidden: Tensor, reference: Tensor | None = None) -> None:
        """Replaces the inputs by the outputs of a block."""
        self.inputs.hidden = hidden
        self.search.hidden = hidden[self.search_rows]
        self.reference = reference
        if self.tuning is not None:
            self.tuning.hidden = hidden

    def pass_on(self, passed: Mapping[str, Tensor], device: torch.device) -> None:
        """Stores outputs of blocks other than hidden states where later blocks read them."""
        self.inputs.pass_on(passed, device)
        self.search.pass_on({name: tensor[self.search_rows] for name, tensor in passed.items()}, device)
        if self.tuning is not None:
            self.tuning.pass_on(passed, device)


def run_all(
    block: LoadedBlock,
    inputs: BlockInputs,
    index: int,
    workers: Workers,
    tick: Callable[[float], None] = lambda _: None,
) -> Tensor:
    """Returns the block's output `[N, L, H]` on the host for all calibration sequences. Raises NumericsError: the
    output contains NaN or infinity."""
    outputs, copies = torch.empty_like(inputs.hidden), block.copies(workers)

    def forward(worker: Worker, number: int) -> None:
        for hidden, call in inputs.batches(index, worker.device, [number]):
            outputs[inputs.rows(number)] = call.run(copies[worker.number].module, hidden)

    for number, _ in enumerate(workers.map(forward, range(len(inputs.calls))), 1):
        tick(number / len(inputs.calls))
    if not torch.isfinite(outputs.sum(dtype=torch.float64)):
        bad = int((~torch.isfinite(outputs)).sum())
        raise NumericsError(
            f"the output of {block.name} holds {bad} NaN or infinite values among {outputs.numel()}",
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
    """Runs the embedding over `tokens [N, L]` and records the arguments of every block. Raises CheckpointError: an
    embedding tensor is missing or misshapen; NumericsError: it holds NaN or infinity. `embedding`: `[V, H]`,
    replacement of the stored embedding."""
    trunk = skeleton.model.get_submodule(skeleton.architecture.blocks.rpartition(".")[0])
    recorders = _stand_in(skeleton)
    try:
        for name, child in _outside(skeleton, trunk).items():
            fill(child, name, files, device, dtype)
        if embedding is not None:
            looked_up = skeleton.model.get_submodule(skeleton.architecture.embedding).get_parameter("weight")
            looked_up.data = embedding.to(device, dtype)
        hidden: list[Tensor] = []
        calls: list[list[Call]] = []
        for batch in tokens.split(micro_batch):
            recorded = _record(trunk, recorders, batch.to(device))
            if recorders[0].hidden.shape[:2] != batch.shape:
                raise cannot_calibrate(
                    f"its hidden states are {list(recorders[0].hidden.shape)} for {list(batch.shape)}"
                )
            hidden.append(recorders[0].hidden.cpu())
            calls.append([_shared(call, first) for call, first in zip(recorded, (calls or [recorded])[0], strict=True)])
    finally:
        _stand_back(skeleton, recorders)
        for child in _outside(skeleton, trunk).values():
            release(child)
    return BlockInputs(torch.cat(hidden), calls, micro_batch)


class StandIn(nn.Module):
    """Replacement of a block with the same attributes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class _Recorder(StandIn):
    """Module that records its arguments."""

    hidden: Tensor
    call: Call

    def __init__(self, block: nn.Module, is_last: bool) -> None:
        super().__init__(block)
        self.is_last = is_last

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Any]:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if PASSED in kwargs and kwargs[PASSED] is None:
            kwargs[PASSED] = UserDict()
        self.hidden, self.call = hidden, Call(args[1:], kwargs)
        if self.is_last:
            raise _AllRecorded
        return (hidden, kwargs[PASSED]) if PASSED in kwargs else hidden


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
    try:
        trunk(input_ids=tokens, use_cache=False)
    except _AllRecorded:
        return [recorder.call for recorder in recorders]
    except NONSENSE as error:
        if is_out_of_memory(error):
            raise
        raise cannot_calibrate(f"{type(trunk).__name__} fails: {type(error).__name__}: {error}") from error
    raise cannot_calibrate(f"{type(trunk).__name__} does not call every block")


def _outside(skeleton: Skeleton, trunk: nn.Module) -> dict[str, nn.Module]:
    """Returns the trunk's children other than the blocks, by full name."""
    prefix = skeleton.architecture.blocks.rpartition(".")[0]
    return {f"{prefix}.{name}": child for name, child in trunk.named_children() if child is not skeleton.blocks}


def _shared(call: Call, first: Call) -> Call:
    """Returns the first micro-batch's arguments in place of equal ones, which stores them once."""
    return first if _equal(call.args, first.args) and _equal(call.kwargs, first.kwargs) else call


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return type(left) is type(right) and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    # Blocks pass outputs to later ones in a store per micro-batch, which is still empty here.
    return left is right if isinstance(left, UserDict) else left is right or left == right
