"""Recurrent states that are kept in fewer bits than they are computed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.backends.state_memory import StateMemory, StepStates
from runtime.core.state_rows import StateRows, decode_state_rows, whole_state_rows

if TYPE_CHECKING:
    from runtime.backends.base import Model


@dataclass(frozen=True, slots=True)
class NarrowStates(StepStates):
    """As `StepStates`. A layer computes on copies of the states that it reads, which are rounded when they are kept.

    So every kernel serves any dtype. Within a step states are passed on as they were computed.

    Attributes:
        wide: by layer and name, the dtype in which a state is computed.
    """

    wide: Mapping[int, Mapping[str, torch.dtype]]

    def mix(self, layer: int, x: Tensor, compute: Callable[[Tensor, StepStates], Tensor]) -> Tensor:
        reads, writes = self.rows.read_slots, self.rows.write_slots
        copies = {name: self._widened(layer, name, dtype) for name, dtype in self.wide[layer].items()}
        slots = torch.arange(len(reads) + len(writes), device=reads.device)
        rows = replace(self.rows, read_slots=slots[: len(reads)], write_slots=slots[len(reads) :])
        mixed = compute(x, StepStates(rows, {layer: copies}))
        for name, copy in copies.items():
            self.write(layer, name, _rounded(copy[len(reads) :], self.tensors[layer][name].dtype))
        return mixed

    def _widened(self, layer: int, name: str, dtype: torch.dtype) -> Tensor:
        """Returns states that are read, and room for those that are written."""
        kept, count = self.tensors[layer][name], len(self.rows.read_slots)
        copy = kept.new_empty((count + len(self.rows.write_slots), *kept.shape[1:]), dtype=dtype)
        copy[:count] = self.read(layer, name)
        return copy


def _rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Saturates where float16 ends."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        states = states.clamp(-limit, limit)
    return states.to(dtype)


@dataclass(frozen=True, slots=True)
class TokenStates(NarrowStates):
    """As `NarrowStates`, for sequences of one length that are computed one token at a time, as in decoding: each state
    is rounded as often as it can be."""

    def mix(self, layer: int, x: Tensor, compute: Callable[[Tensor, StepStates], Tensor]) -> Tensor:
        read, write = self.rows.read_slots, self.rows.write_slots
        mixed = []
        for tokens in x.unflatten(0, (len(read), -1)).unbind(1):
            step = NarrowStates(decode_state_rows(read, write), self.tensors, self.wide)
            mixed.append(step.mix(layer, tokens, compute))
            read = write
        return torch.stack(mixed, 1).flatten(0, 1)


def step_states(memory: StateMemory, rows: StateRows) -> StepStates:
    """Returns the states of a step, as they are or widened while layers compute."""
    is_narrow = any(
        tensor.dtype != memory.wide[layer][name]
        for layer, parts in memory.tensors.items()
        for name, tensor in parts.items()
    )
    return NarrowStates(rows, memory.tensors, memory.wide) if is_narrow else StepStates(rows, memory.tensors)


def token_states(model: Model, lengths: Sequence[int], kept: str) -> StepStates | None:
    """Returns the states of sequences of one length that are computed from their first token on, rounded after every
    token to the dtype `kept`; None for a model without recurrent layers."""
    fields = model.config.state_fields
    if not fields:
        return None
    memory = StateMemory(fields, len(lengths), model.dtype, model.device, kept=kept)
    return TokenStates(whole_state_rows(lengths, model.device), memory.tensors, memory.wide)
