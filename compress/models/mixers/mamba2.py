"""Selective state space models of Mamba-2 (arXiv:2405.21060)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compress.models.linear import Linear
from compress.models.norm import Norm
from compress.models.state import StateField

HEAD_VECTORS = ("A_log", "D", "dt_bias")
"""Vectors of Mamba-2 with a number for each head: logarithm of the decay, share of the input, offset of the step."""


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A selective state space model (Mamba-2, arXiv:2405.21060) behind a short causal convolution.

    Attributes:
        num_heads, num_groups: heads, and groups of them that share what goes into and comes out of the state.
        head_dim: channels of a head.
        state_size: numbers that the state keeps for each channel.
        qkv: one projection, of gates, heads, inputs and outputs of the state, and steps, in this order.
        output: reads the heads.
        norm: over the heads of each group, behind their gate; None for none.
        norms_before_gate: the gate comes behind the norm.
        kernel: tokens that the convolution over heads, inputs and outputs of the state sees.
        has_conv_bias: whether a bias is added to the convolution.
        step_limits: least and largest step.
        activation: behind the convolution.
        factors: on the five parts of the projection; () for none.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    qkv: tuple[Linear, ...]
    output: Linear
    norm: Norm | None
    kernel: int
    norms_before_gate: bool = False
    has_conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    activation: str = "silu"
    factors: tuple[float, ...] = ()
    name: str = "mamba"

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return sum(self.sizes[1:4])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the five parts of the projection."""
        return self.inner_size, self.inner_size, *(2 * (self.num_groups * self.state_size,)), self.num_heads

    @property
    def linears(self) -> tuple[Linear, ...]:
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
        """Shape of its convolution, decay, step and skipped share by tensor name."""
        found: dict[str, tuple[int, ...]] = {f"{self.name}.{part}": (self.num_heads,) for part in HEAD_VECTORS}
        found[self.conv] = (self.conv_size, 1, self.kernel)
        return found | ({self.bias: (self.conv_size,)} if self.bias else {})

    @property
    def norms(self) -> tuple[Norm, ...]:
        return () if self.norm is None else (self.norm,)

    @property
    def routers(self) -> tuple[Linear, ...]:
        return ()

    @property
    def state_fields(self) -> dict[str, StateField]:
        """The last inputs of the convolution, and a matrix for each head."""
        matrix = self.num_heads, self.state_size, self.head_dim
        return {"window": StateField((self.kernel - 1, self.conv_size)), "matrix": StateField(matrix, is_exact=True)}
