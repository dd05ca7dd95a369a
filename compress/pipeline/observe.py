"""Statistics of what the linears of a block receive. Linears that receive the same tensor share one record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from calibration.statistics import InputStatistics
from compress.pipeline.blocks import LoadedBlock
from compress.pipeline.capture import BlockInputs, Call, run_block


@dataclass(frozen=True, slots=True)
class Need:
    """What a method wants to know of a linear's inputs."""

    hessian: bool = False
    sample_rows: int = 0

    def __or__(self, other: Need) -> Need:
        return Need(self.hessian or other.hessian, max(self.sample_rows, other.sample_rows))


@dataclass(frozen=True, slots=True)
class Observed:
    """Statistics by linear; `groups` lists linears that share their input, hence one statistics object."""

    statistics: dict[str, InputStatistics]
    groups: tuple[tuple[str, ...], ...]


def observe(
    block: LoadedBlock,
    inputs: BlockInputs,
    index: int,
    needs: dict[str, Need],
    device: torch.device,
    tick: Callable[[float], None] = lambda _: None,
) -> Observed:
    """Runs the whole calibration through a block and gathers statistics of its linears' inputs.

    The first micro-batch shows which linears receive the very same tensor; from then on one of them counts for all.
    A linear that nothing reaches (an unused expert) is in no group.

    Args:
        tick: told the share of the calibration that has passed.

    Raises:
        NumericsError: NaN or infinity in an input, naming the linear.
    """
    batches = inputs.batches(index, device)
    first, _ = linear_inputs(block, *next(batches), tuple(needs))
    groups = _same_tensor(first)
    leaders = {group[0]: _statistics(block, group, needs, device) for group in groups}
    for leader, statistics in leaders.items():
        statistics.update(first[leader])
    first.clear()
    handles = [_on_input(block.linear(leader), statistics.update) for leader, statistics in leaders.items()]
    try:
        for number, (hidden, call) in enumerate(batches, 1):
            tick(number / len(inputs.calls))
            run_block(block.module, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    return Observed({name: leaders[group[0]] for group in groups for name in group}, groups)


def linear_inputs(
    block: LoadedBlock, hidden: Tensor, call: Call, linears: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """The input of each linear in one forward pass, in the order in which they are reached, and the block's output."""
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
    block: LoadedBlock, group: tuple[str, ...], needs: dict[str, Need], device: torch.device
) -> InputStatistics:
    need = Need()
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
