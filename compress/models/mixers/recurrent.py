"""Description that every mixer with a state of fixed size gives of itself."""

from __future__ import annotations

from typing import Protocol

from compress.models.linear import Linear
from compress.models.norm import Norm
from compress.models.state import StateField


class Recurrent(Protocol):
    """A mixer that keeps a state of fixed size for each sequence in place of keys and values."""

    @property
    def name(self) -> str:
        """Prefix of its tensors inside of a block."""

    @property
    def qkv(self) -> tuple[Linear, ...]:
        """Linears that read the residual stream, but those that stay dense."""

    @property
    def output(self) -> Linear:
        """The linear that adds to the residual stream."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are computed, but those that stay dense."""

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Norms inside of it."""

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every other tensor, by name."""

    @property
    def state_fields(self) -> dict[str, StateField]:
        """Tensors of the state of one sequence, by name."""
