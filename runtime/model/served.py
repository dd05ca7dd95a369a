"""Models as a runner drives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from runtime.backends.base import Model
from runtime.backends.expert_slots import ExpertSlots


class ServedModel(Model, Protocol):
    """A decoder-only model without state between calls."""

    @property
    def description(self) -> tuple[str, ...]:
        """The kernel of each kind of linear, one line each."""
        ...

    @property
    def linears(self) -> Mapping[tuple[str, str, str], int]:
        """Number of linears by their names, form and kernel."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of all weights; one that is used twice counts once."""
        ...

    @property
    def expert_slots(self) -> tuple[ExpertSlots, ...]:
        """Slots on the device of all mixtures with experts in host memory."""
        ...

    def for_length(self, length: int) -> ServedModel:
        """Returns the model for sequences of up to `length` tokens."""
        ...

    def for_streams(self) -> ServedModel:
        """Returns the model for positions far beyond its context."""
        ...

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Last hidden states of transformers `[T, H]`, of what `forward` returns."""
        ...

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[T, V]` of what `forward` returns, in the dtype of the head."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """As `head_logits`, in float32, or float64 for a float64 model."""
        ...
