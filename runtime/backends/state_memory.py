"""Memory of recurrent states: per layer named tensors with one row for each slot of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.models.mixers.mixer import StateField
from runtime.core.state_rows import StateRows, decode_state_rows
from runtime.core.step import BlockOffload, BlockRestore

NUM_SPARE_SLOTS = 2
"""Slots after those of the pool: `num_slots` holds zeros, and `num_slots + 1` takes what rows of padding write."""


class StateMemory:
    """Storage for the states of `num_slots` sequences in every recurrent layer, and for some more in host memory. Not
    initialized, except for zeros.

    Args:
        fields: by layer and name.
        dtype: of activations.
        kept: name of the dtype of exact states; float32 is the dtype in which they are computed.

    Attributes:
        tensors: by layer and name, `[num_slots + 2, *shape]`.
        host: by layer and name, `[num_host_slots, *shape]`, in pinned memory where the device is a GPU.
        wide: dtype in which each is computed, by layer and name.
    """

    def __init__(
        self,
        fields: Mapping[int, Mapping[str, StateField]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_slots: int = 0,
        kept: str = STATE_FLOAT32,
    ) -> None:
        self.num_slots = num_slots
        pinned = device.type == "cuda" and num_host_slots > 0
        exact = torch.promote_types(dtype, torch.float32)
        self.wide = {
            layer: {name: exact if field.is_exact else dtype for name, field in parts.items()}
            for layer, parts in fields.items()
        }
        exact = exact if kept == STATE_FLOAT32 else getattr(torch, kept)
        self.tensors = {
            layer: {
                name: _allocate(field, num_slots, exact if field.is_exact else dtype, device)
                for name, field in parts.items()
            }
            for layer, parts in fields.items()
        }
        self.host = {
            layer: {
                name: torch.empty((num_host_slots, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
                for name, tensor in parts.items()
            }
            for layer, parts in self.tensors.items()
        }

    def offload(self, offloads: Iterable[BlockOffload]) -> None:
        """Saves states in host memory. Only `restore` reads it, on the same stream, so no synchronization is needed."""
        for offload in offloads:
            for here, there in self._pairs():
                there[offload.slot].copy_(here[offload.block], non_blocking=True)

    def restore(self, restores: Iterable[BlockRestore]) -> None:
        """Fills slots with what was saved."""
        for restore in restores:
            for here, there in self._pairs():
                here[restore.block].copy_(there[restore.slot], non_blocking=True)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor and its part in host memory."""
        for layer, parts in self.tensors.items():
            yield from ((tensor, self.host[layer][name]) for name, tensor in parts.items())


def _allocate(field: StateField, num_slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty((num_slots + NUM_SPARE_SLOTS, *field.shape), dtype=dtype, device=device)
    tensor[num_slots].zero_()
    return tensor


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of one step, as recurrent layers read and write them.

    Attributes:
        rows: which rows belong together, and which slots they read and write.
        tensors: by layer and name, `[slots, *shape]`.
    """

    rows: StateRows
    tensors: Mapping[int, Mapping[str, Tensor]]

    def read(self, layer: int, name: str) -> Tensor:
        """Returns the state before the first row of each sequence, `[S, *shape]`, as a copy."""
        return self.tensors[layer][name].index_select(0, self.rows.read_slots)

    def mix(self, layer: int, x: Tensor, compute: Callable[[Tensor, StepStates], Tensor]) -> Tensor:
        """Computes a layer: `compute` gives `[T, H]` of `x [T, H]` and keeps states."""
        return compute(x, self)

    def write(self, layer: int, name: str, states: Tensor) -> None:
        """Stores the state after each segment, `[W, *shape]`; read all before that."""
        self.tensors[layer][name].index_copy_(0, self.rows.write_slots, states)


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
