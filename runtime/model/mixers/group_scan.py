"""Scans over the sequences of a step: states are read before their rows and kept after each segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from runtime.backends.state_memory import StepStates
from runtime.model.mixers.causal_conv import RowGroup, group_rows


class ScanRows(Protocol):
    """Inputs of a scan."""

    def tokens(self, start: int, stop: int) -> Self:
        """Those of some tokens."""


Inputs = TypeVar("Inputs", bound=ScanRows)


def scan_groups(
    states: StepStates, layer: int, rows: Sequence[Tensor], scan: Callable[..., tuple[Tensor, ...]]
) -> Tensor:
    """Computes `[T, *]` of `rows`, `[T, *]` each, group by group.

    Args:
        scan: computes a group, its rows and the states before them, in the order of their names; gives its result and
            these states after each segment.
    """
    groups, names = group_rows(states.rows), tuple(states.tensors[layer])
    sequences, tokens = [each.num_sequences for each in groups], [each.num_rows for each in groups]
    before = (states.read(layer, name).split(sequences) for name in names)
    parts = (part.split(tokens) for part in rows)
    found, *after = zip(*(scan(*each) for each in zip(groups, *parts, *before, strict=True)), strict=True)
    for name, written in zip(names, after, strict=True):
        states.write(layer, name, torch.cat(written))
    return torch.cat(found)


def scan_segments(
    group: RowGroup,
    inputs: Inputs,
    state: Tensor,
    compute: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]],
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Computes outputs `[B, H, n, V]`, and the state after each segment from that before the first token.

    Args:
        compute: gives the outputs of some tokens and the state after them.
        chunk: most tokens that are computed at once.
    """
    outputs, after = [], []
    for begin, end in pairwise((0, *group.stops)):
        for start in range(begin, end, chunk):
            output, state = compute(inputs.tokens(start, min(start + chunk, end)), state)
            outputs.append(output)
        after.append(state)
    return torch.cat(outputs, -2), torch.stack(after, 1).flatten(0, 1)
