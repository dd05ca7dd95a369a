"""Memory of recurrent states: per layer named tensors with one row for each slot of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.state import StateField
from runtime.backends.kv_pages import BlockField, BlockMemory
from runtime.core.model_config import DecoderConfig
from runtime.core.state_rows import StateRows, whole_state_rows

NUM_SPARE_SLOTS = 2
"""Slots behind those of the pool: `num_slots` holds zeros, and `num_slots + 1` takes what rows of padding write."""


class StateMemory:
    """Storage for the states of `num_slots` sequences in every recurrent layer. Not initialized, except for zeros.

    Args:
        fields: by layer and name.
        dtype: of activations.

    Attributes:
        memory: moves slots as if they were blocks.
        tensors: by layer and name, `[num_slots + 2, *shape]`.
    """

    def __init__(
        self,
        fields: Mapping[int, Mapping[str, StateField]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_slots: int = 0,
    ) -> None:
        self.num_slots = num_slots
        blocks = {
            _name(layer, name): BlockField(field.shape, _dtype(field, dtype))
            for layer, parts in fields.items()
            for name, field in parts.items()
        }
        self.memory = BlockMemory(blocks, 1, num_slots + NUM_SPARE_SLOTS, device, num_host_slots)
        self.memory.clear([num_slots])
        self.tensors = {
            layer: {name: self.memory.tensors[_name(layer, name)][0] for name in parts}
            for layer, parts in fields.items()
        }


def _name(layer: int, name: str) -> str:
    return f"{layer}.{name}"


def _dtype(field: StateField, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if field.is_exact else dtype


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

    def write(self, layer: int, name: str, states: Tensor) -> None:
        """Stores the state behind each segment, `[W, *shape]`; read all before that."""
        self.tensors[layer][name].index_copy_(0, self.rows.write_slots, states)


def whole_states(config: DecoderConfig, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> StepStates:
    """States of sequences of these lengths that are computed at once, from their first to their last token."""
    memory = StateMemory(config.state_fields, len(lengths), dtype, device)
    return StepStates(whole_state_rows(lengths, device), memory.tensors)
