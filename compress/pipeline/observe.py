"""Statistics of the inputs of a block's linears, summed over the calibration in parts that devices share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from calibration.statistics import InputDifference, InputStatistics
from compress.checkpoint.modeling.experts import mixtures
from compress.common.workers import Worker, Workers
from compress.methods.base import Needs
from compress.pipeline.block import LoadedBlock
from compress.pipeline.capture import BlockInputs, Call
from compress.pipeline.expert_inputs import ExpertCoverage, ExpertStatistics, MixtureInputs

Group = tuple[str, ...]
"""Names of linears that receive the same tensor."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Statistics by linear.

    Attributes:
        groups: linears that share an input and one statistics object, without those of experts.
        experts: likewise for the linears of each expert.
    """

    statistics: Mapping[str, InputStatistics]
    groups: tuple[Group, ...]
    experts: tuple[tuple[Group, ...], ...] = ()
    coverage: tuple[ExpertCoverage, ...] = ()

    @property
    def tasks(self) -> list[tuple[Group, ...]]:
        """Groups that one worker takes: each by itself, but those of an expert, whose statistics are computed at the
        same time, together."""
        return [*((group,) for group in self.groups), *self.experts]

    def shared(self, copies: Sequence[LoadedBlock], workers: Workers) -> list[Mapping[str, InputStatistics]]:
        """Returns the statistics for each worker, which computes those of experts on its device."""
        lazy = self.statistics
        if not isinstance(lazy, ExpertStatistics):
            return [lazy] * len(copies)
        return [lazy.on(copies[worker.number].module, worker.device) for worker in workers.all]


@dataclass
class _Seen:
    """Sums over parts of the calibration: statistics by the first linear of each group, and inputs of mixtures."""

    mixtures: dict[str, MixtureInputs]
    groups: dict[str, Group] = field(default_factory=dict)
    statistics: dict[str, InputStatistics] = field(default_factory=dict)

    def add(self, part: _Seen, device: torch.device) -> None:
        """Adds the next part; all sums are on `device`."""
        for leader, statistics in part.statistics.items():
            if leader in self.statistics:
                self.statistics[leader].add(statistics)
            else:
                self.groups[leader], self.statistics[leader] = part.groups[leader], statistics.to(device)
        for name, inputs in part.mixtures.items():
            self.mixtures[name].add(inputs)


def observe(
    block: LoadedBlock,
    inputs: BlockInputs,
    index: int,
    needs: dict[str, Needs],
    workers: Workers,
    tick: Callable[[float], None] = lambda _: None,
) -> Observed:
    """Runs all calibration sequences through a block and collects statistics of its linears' inputs.

    A linear without input is in no group. Experts have statistics of the tokens that enter their mixture. Raises
    NumericsError: an input contains NaN or infinity; names the linear.
    """
    copies, parts = block.copies(workers), inputs.parts()
    seen = _nothing_seen(block, inputs)

    def look(worker: Worker, numbers: range) -> _Seen:
        copied, batches = copies[worker.number], inputs.batches(index, worker.device, numbers)
        return _observe_part(copied, batches, needs, _nothing_seen(copied, inputs))

    for number, part in enumerate(workers.in_turn(look, parts), 1):
        seen.add(part, workers.device)
        tick(number / len(parts))
    known = {name: seen.statistics[leader] for leader, group in seen.groups.items() for name in group}
    groups = tuple(seen.groups.values())
    if not seen.mixtures:
        return Observed(known, groups)
    experts = _expert_groups(seen.mixtures, needs)
    lazy = ExpertStatistics(known, seen.mixtures, experts, partial(_statistics, block, needs), workers.device)
    coverage = tuple(each.coverage(block.name) for each in seen.mixtures.values())
    return Observed(lazy, groups, tuple(experts.values()), coverage)


def _nothing_seen(block: LoadedBlock, inputs: BlockInputs) -> _Seen:
    found = mixtures(block.module)
    return _Seen({name: MixtureInputs(name, experts, inputs.tokens_per_channel) for name, experts in found})


def _observe_part(
    block: LoadedBlock, batches: Iterator[tuple[Tensor, Call]], needs: dict[str, Needs], seen: _Seen
) -> _Seen:
    """Observes some micro-batches. The first shows which linears receive the same tensor; after that only one of them
    is observed."""
    plain = [name for name in needs if not name.startswith(tuple(f"{mixture}." for mixture in seen.mixtures))]
    handles = [each.experts.register_forward_pre_hook(each.record) for each in seen.mixtures.values()]
    try:
        first, _ = linear_inputs(block, *next(batches), plain)
        for group in _same_tensor(first):
            leader, inputs = group[0], first[group[0]]
            seen.groups[leader], seen.statistics[leader] = group, _statistics(block, needs, group, inputs.device)
            seen.statistics[leader].update(inputs)
        first.clear()
        handles += [_on_input(block.linear(leader), each.update) for leader, each in seen.statistics.items()]
        for hidden, call in batches:
            call.run(block.module, hidden)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _expert_groups(
    found: Mapping[str, MixtureInputs], needs: Mapping[str, Needs]
) -> dict[tuple[str, int], tuple[Group, ...]]:
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
        output = call.run(block.module, hidden)
    finally:
        for handle in handles:
            handle.remove()
    return seen, output


def _same_tensor(inputs: dict[str, Tensor]) -> tuple[Group, ...]:
    groups: dict[int, list[str]] = {}
    for name, tensor in inputs.items():
        groups.setdefault(id(tensor), []).append(name)
    return tuple(map(tuple, groups.values()))


def _statistics(block: LoadedBlock, needs: dict[str, Needs], group: Group, device: torch.device) -> InputStatistics:
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
    workers: Workers,
    tick: Callable[[float], None] = lambda _: None,
) -> tuple[dict[str, InputDifference], Tensor]:
    """Runs the calibration inputs of both models through a block with unmodified weights.

    Args:
        inputs: inputs of the block in the quantized model.
        reference: `[N, L, H]`, inputs of the block in the dense model.

    Returns:
        Input differences by linear, without experts that receive other tokens in the dense model; and the dense model's
        next hidden states `[N, L, H]` on the host.
    """
    outputs, copies, parts = torch.empty_like(reference), block.copies(workers), inputs.parts()

    def compare(worker: Worker, numbers: range) -> dict[str, InputDifference]:
        copied, device = copies[worker.number], worker.device
        found = {name: InputDifference(block.linear(name).in_features, device) for name in linears}
        for number, (hidden, call) in zip(numbers, inputs.batches(index, device, numbers), strict=True):
            rows = inputs.rows(number)
            wanted, outputs[rows] = linear_inputs(copied, reference[rows].to(device), call, linears)
            seen, _ = linear_inputs(copied, hidden, call, linears)
            found = {name: each for name, each in found.items() if _add(each, seen.get(name), wanted.get(name))}
        return found

    found = {name: InputDifference(block.linear(name).in_features, workers.device) for name in linears}
    for number, part in enumerate(workers.in_turn(compare, parts), 1):
        found = {name: each for name, each in found.items() if name in part}
        for name, each in found.items():
            each.add(part[name])
        tick(number / len(parts))
    return found, outputs


def _add(difference: InputDifference, seen: Tensor | None, wanted: Tensor | None) -> bool:
    if seen is None or wanted is None or seen.shape != wanted.shape:
        return False
    difference.update(seen, wanted)
    return True
