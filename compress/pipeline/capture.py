"""Inputs of each transformer block: hidden states, and all other arguments as passed by the model.

The model's own forward runs once over its embedding with recorders in place of the blocks. Rotary embeddings, masks
and other arguments of blocks therefore come from the family's own code, and no forward pass is reimplemented here.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from calibration.statistics import InputDifference, InputStatistics
from compress.checkpoint.modeling.experts import mixtures
from compress.checkpoint.reader import NONSENSE
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import CheckpointError, NumericsError
from compress.methods.base import METHODS, Needs
from compress.pipeline.block import LoadedBlock, fill, release
from compress.pipeline.expert_inputs import TOKENS_PER_CHANNEL, ExpertCoverage, ExpertStatistics, MixtureInputs
from compress.pipeline.memory import is_out_of_memory
from compress.pipeline.skeleton import Skeleton

PASSED = "prev_topk_indices"
"""Argument that passes further outputs of one block to the next; replaced by a store."""


def cannot_calibrate(reason: str) -> CheckpointError:
    """Builds the error for modeling code whose blocks cannot be run one at a time."""
    usable = next(name for name, method in METHODS["quantize"].items() if method.is_fallback)
    return CheckpointError(
        f"the blocks of this model cannot be run one at a time ({' '.join(reason.split())})",
        f"Use a method without calibration: --method {usable}",
    )


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one block for one micro-batch, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        """Returns a block's output `[B, L, H]`; families that return a tuple put it first.

        Raises:
            CheckpointError: modeling code that needs more than hidden states and the recorded arguments.
        """
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
        return output


@dataclass
class BlockInputs:
    """Calibration inputs of the current block.

    Attributes:
        hidden: `[N, L, H]` on the host, input of the next block, in the dtype of computation.
        calls: arguments of every block per micro-batch; equal ones are the same object.
        micro_batch: sequences per forward pass.
        tokens_per_channel: minimum tokens per channel of the statistics of experts.
    """

    hidden: Tensor
    calls: list[list[Call]]
    micro_batch: int
    tokens_per_channel: int = TOKENS_PER_CHANNEL

    def batches(self, index: int, device: torch.device) -> Iterator[tuple[Tensor, Call]]:
        """Yields hidden states `[B, L, H]` on `device` and arguments of block `index` for each micro-batch."""
        for hidden, calls in zip(self.hidden.split(self.micro_batch), self.calls, strict=True):
            yield hidden.to(device), calls[index]

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
        inputs: inputs of all sequences.
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


def run_block(module: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """Returns a block's output `[B, L, H]`; families that return a tuple put it first."""
    return call.run(module, hidden)


def run_all(
    module: nn.Module,
    name: str,
    inputs: BlockInputs,
    index: int,
    device: torch.device,
    tick: Callable[[float], None] = lambda _: None,
) -> Tensor:
    """Returns the block's output `[N, L, H]` on the host for all calibration sequences.

    Args:
        tick: callback with the completed share of the calibration.

    Raises:
        NumericsError: the output contains NaN or infinity.
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
    """Runs the embedding over `tokens [N, L]` and records the arguments of every block.

    Args:
        embedding: `[V, H]`, replacement of the stored embedding.

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


def _fill_outside(
    skeleton: Skeleton, trunk: nn.Module, files: TensorFiles, device: torch.device, dtype: torch.dtype
) -> None:
    for name, child in _outside(skeleton, trunk).items():
        fill(child, name, files, device, dtype)


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


@dataclass(frozen=True, slots=True)
class Observed:
    """Statistics by linear.

    Attributes:
        groups: linears that share an input and one statistics object, without those of experts.
        expert_groups: likewise for the linears of each expert.
        coverage: coverage of every mixture's experts.
    """

    statistics: Mapping[str, InputStatistics]
    groups: tuple[tuple[str, ...], ...]
    expert_groups: tuple[tuple[str, ...], ...] = ()
    coverage: tuple[ExpertCoverage, ...] = ()


def observe(
    block: LoadedBlock,
    inputs: BlockInputs,
    index: int,
    needs: dict[str, Needs],
    device: torch.device,
    tick: Callable[[float], None] = lambda _: None,
) -> Observed:
    """Runs all calibration sequences through a block and collects statistics of its linears' inputs.

    The first micro-batch shows which linears receive the same tensor; after that only one of them is observed. A linear
    without input is in no group. Experts have statistics of the tokens that enter their mixture.

    Args:
        tick: callback with the completed share of the calibration.

    Raises:
        NumericsError: an input contains NaN or infinity; names the linear.
    """
    found = {name: MixtureInputs(name, experts, inputs.tokens_per_channel) for name, experts in mixtures(block.module)}
    plain = [name for name in needs if not name.startswith(tuple(f"{mixture}." for mixture in found))]
    batches = inputs.batches(index, device)
    handles = [each.experts.register_forward_pre_hook(each.record) for each in found.values()]
    try:
        first, _ = linear_inputs(block, *next(batches), plain)
        groups = _same_tensor(first)
        leaders = {group[0]: _statistics(block, group, needs, device) for group in groups}
        for leader, statistics in leaders.items():
            statistics.update(first[leader])
        first.clear()
        handles += [_on_input(block.linear(leader), statistics.update) for leader, statistics in leaders.items()]
        for number, (hidden, call) in enumerate(batches, 1):
            tick(number / len(inputs.calls))
            run_block(block.module, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    known = {name: leaders[group[0]] for group in groups for name in group}
    if not found:
        return Observed(known, groups)
    experts = _expert_groups(found, needs)
    lazy = ExpertStatistics(known, found, experts, lambda group: _statistics(block, group, needs, device), device)
    coverage = tuple(each.coverage(block.name) for each in found.values())
    return Observed(lazy, groups, tuple(chain.from_iterable(experts.values())), coverage)


def _expert_groups(
    found: Mapping[str, MixtureInputs], needs: Mapping[str, Needs]
) -> dict[tuple[str, int], tuple[tuple[str, ...], ...]]:
    """Returns the requested linears of each expert, grouped by shared input."""
    return {
        (mixture, index): tuple(
            group
            for names in each.experts.inputs_of(index)
            if (group := tuple(name for leaf in names if (name := f"{mixture}.{index}.{leaf}") in needs))
        )
        for mixture, each in found.items()
        for index in range(len(each.experts))
    }


def linear_inputs(
    block: LoadedBlock, hidden: Tensor, call: Call, linears: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the input of each linear in one forward pass, in execution order, and the block's output."""
    seen: dict[str, Tensor] = {}
    handles = [_on_input(block.linear(name), partial(seen.setdefault, name)) for name in linears]
    try:
        output = run_block(block.module, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    return seen, output


def _same_tensor(inputs: dict[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, tensor in inputs.items():
        groups.setdefault(id(tensor), []).append(name)
    return tuple(map(tuple, groups.values()))


def _statistics(
    block: LoadedBlock, group: tuple[str, ...], needs: dict[str, Needs], device: torch.device
) -> InputStatistics:
    need = Needs()
    for name in group:
        need |= needs[name]
    return InputStatistics(
        block.linear(group[0]).in_features,
        f"{block.name}.{group[0]}",
        hessian=need.hessian,
        sample_rows=need.sample_rows,
        device=device,
    )


def _on_input(module: nn.Module, action: Callable[[Tensor], Any]) -> RemovableHandle:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
        action(args[0])

    return module.register_forward_pre_hook(hook)


def follow_dense(
    block: LoadedBlock,
    inputs: BlockInputs,
    reference: Tensor,
    index: int,
    linears: Sequence[str],
    device: torch.device,
    tick: Callable[[float], None] = lambda _: None,
) -> tuple[dict[str, InputDifference], Tensor]:
    """Runs the calibration inputs of both models through a block with unmodified weights.

    Args:
        inputs: inputs of the block in the quantized model.
        reference: `[N, L, H]`, inputs of the block in the dense model.
        linears: linears whose inputs are compared.
        tick: callback with the completed share of the calibration.

    Returns:
        Input differences by linear, without experts that receive other tokens in the dense model; and the dense model's
        next hidden states `[N, L, H]` on the host.
    """
    found = {name: InputDifference(block.linear(name).in_features, device) for name in linears}
    outputs = torch.empty_like(reference)
    begin = 0
    for hidden, call in inputs.batches(index, device):
        tick(begin / len(outputs))
        rows = slice(begin, begin + len(hidden))
        wanted, output = linear_inputs(block, reference[rows].to(device), call, linears)
        outputs[rows] = output
        seen, _ = linear_inputs(block, hidden, call, linears)
        found = {name: each for name, each in found.items() if _add(each, seen.get(name), wanted.get(name))}
        begin = rows.stop
    return found, outputs


def _add(difference: InputDifference, seen: Tensor | None, wanted: Tensor | None) -> bool:
    if seen is None or wanted is None or seen.shape != wanted.shape:
        return False
    difference.update(seen, wanted)
    return True
