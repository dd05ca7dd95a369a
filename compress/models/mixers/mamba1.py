"""Selective state space models of Mamba-1 (arXiv:2312.00752)."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.linear import Linear
from compress.models.norm import Norm
from compress.models.state import StateField


@dataclass(frozen=True, slots=True)
class Mamba1:
    """A selective state space model (arXiv:2312.00752, section 3) behind a short causal convolution, as in Jamba.

    Attributes:
        size: channels.
        state_size: numbers that the state keeps for each channel.
        qkv: one projection, of channels and their gates, in this order.
        select: reads the convolved channels and gives inner channels of steps, and inputs and outputs of the state, in
            this order; stays dense.
        step: reads these inner channels and gives the step of each channel; stays dense.
        output: reads the channels.
        norms: over each of the three parts that `select` gives.
        kernel: tokens that the convolution sees.
        has_conv_bias: whether a bias is added to the convolution.
        activation: behind the convolution.
    """

    size: int
    state_size: int
    qkv: tuple[Linear, ...]
    select: Linear
    step: Linear
    output: Linear
    norms: tuple[Norm, ...]
    kernel: int
    has_conv_bias: bool = True
    activation: str = "silu"
    name: str = "mamba"

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are computed, but those that stay dense."""
        return *self.qkv, self.output

    @property
    def conv(self) -> str:
        """Name of the weight of the convolution."""
        return f"{self.name}.conv1d.weight"

    @property
    def bias(self) -> str:
        """Name of the bias of the convolution; "" for none."""
        return f"{self.name}.conv1d.bias" if self.has_conv_bias else ""

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its convolution, decay and skipped share by tensor name."""
        found: dict[str, tuple[int, ...]] = {
            f"{self.name}.A_log": (self.size, self.state_size),
            f"{self.name}.D": (self.size,),
            self.conv: (self.size, 1, self.kernel),
        }
        return found | ({self.bias: (self.size,)} if self.bias else {})

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""
        return self.select, self.step

    @property
    def state_fields(self) -> dict[str, StateField]:
        """The last inputs of the convolution, and a row for each channel."""
        rows = StateField((self.size, self.state_size), is_exact=True)
        return {"window": StateField((self.kernel - 1, self.size)), "matrix": rows}
