"""Memory of recurrent states: per layer named tensors with one row for each slot of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.models.state import StateField
from runtime.core.state_rows import StateRows, whole_state_rows
from runtime.core.step import BlockOffload, BlockRestore

if TYPE_CHECKING:
    from runtime.backends.base import Model

NUM_SPARE_SLOTS = 2
"""Slots behind those of the pool: `num_slots` holds zeros, and `num_slots + 1` takes what rows of padding write."""


class StateMemory:
    """Storage for the states of `num_slots` sequences in every recurrent layer, and for some more in host memory. Not
    initialized, except for zeros.

    Args:
        fields: by layer and name.
        dtype: of activations.
        kept: name of the dtype of exact states; float32 is the dtype in which they are computed.

    Attributes:
        tensors: by layer and name, `[num_slots + 2, *shape]`.
        host: by layer and name, `[num_host_slots, *shape]`, pinned beside a GPU.
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
        """Stores the state behind each segment, `[W, *shape]`; read all before that."""
        self.tensors[layer][name].index_copy_(0, self.rows.write_slots, states)


def whole_states(model: Model, lengths: Sequence[int]) -> StepStates | None:
    """States of sequences of these lengths that are computed at once, from their first to their last token; None for a
    model without recurrent layers."""
    fields = model.config.state_fields
    if not fields:
        return None
    memory = StateMemory(fields, len(lengths), model.dtype, model.device)
    return StepStates(whole_state_rows(lengths, model.device), memory.tensors)
