"""Short convolutions between two gates (arXiv:2511.23404)."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.linear import Linear
from compress.models.norm import Norm
from compress.models.state import StateField


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A causal convolution over few tokens between two gates: `output(c * conv(b * x))` (arXiv:2511.23404).

    Attributes:
        qkv: one projection, of b, c and x in this order.
        output: reads as many channels as the residual stream has.
        kernel: tokens that the convolution sees.
    """

    qkv: tuple[Linear, ...]
    output: Linear
    kernel: int
    name: str = "conv"

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.qkv, self.output

    @property
    def conv(self) -> str:
        """Name of the weight of the convolution."""
        return f"{self.name}.conv.weight"

    @property
    def bias(self) -> str:
        """Name of the bias of the convolution; "" for none."""
        return f"{self.name}.conv.bias" if self.output.bias else ""

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its convolution by tensor name."""
        size = self.output.in_features
        found = {self.conv: (size, 1, self.kernel), self.bias: (size,)}
        return {name: shape for name, shape in found.items() if name}

    @property
    def norms(self) -> tuple[Norm, ...]:
        return ()

    @property
    def routers(self) -> tuple[Linear, ...]:
        return ()

    @property
    def state_fields(self) -> dict[str, StateField]:
        """The last inputs of the convolution."""
        return {"window": StateField((self.kernel - 1, self.output.in_features))}
