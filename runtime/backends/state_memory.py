"""Memory of recurrent states: per layer named tensors with one row for each slot of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.models.state import StateField
from runtime.core.state_rows import StateRows, whole_state_rows

if TYPE_CHECKING:
    from runtime.backends.base import Model

NUM_SPARE_SLOTS = 2
"""Slots behind those of the pool: `num_slots` holds zeros, and `num_slots + 1` takes what rows of padding write."""


class StateMemory:
    """Storage for the states of `num_slots` sequences in every recurrent layer. Not initialized, except for zeros.

    Args:
        fields: by layer and name.
        dtype: of activations.

    Attributes:
        tensors: by layer and name, `[num_slots + 2, *shape]`.
    """

    def __init__(
        self,
        fields: Mapping[int, Mapping[str, StateField]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.tensors = {
            layer: {name: _allocate(field, num_slots, dtype, device) for name, field in parts.items()}
            for layer, parts in fields.items()
        }


def _allocate(field: StateField, num_slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    kept = torch.promote_types(dtype, torch.float32) if field.is_exact else dtype
    tensor = torch.empty((num_slots + NUM_SPARE_SLOTS, *field.shape), dtype=kept, device=device)
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
