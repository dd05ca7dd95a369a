"""Mixers that keep a state of fixed size for each sequence in place of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compress.models.spec import Linear, Norm
from compress.models.state import StateField


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule (arXiv:2412.06464) behind a short causal convolution.

    Attributes:
        num_heads, num_key_heads: value heads, and heads of queries and keys, each of which serves as many value heads.
        key_dim, value_dim: channels of one head.
        qkv: projections of queries, keys, values and output gates, in this order.
        gates: projections of the strength of each update (beta) and of the decay, in this order; stay dense.
        output: reads the value heads.
        norm: over each value head, before its gate.
        kernel: tokens that the convolution over queries, keys and values sees.
        grouped: rows of a projection are sorted by key head, not by what they project.
        activation: behind the convolution.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    qkv: tuple[Linear, ...]
    gates: tuple[Linear, ...]
    output: Linear
    norm: Norm
    kernel: int
    grouped: bool = False
    activation: str = "silu"
    name: str = "linear_attn"

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its convolution, decay and offset of the decay by tensor name."""
        heads = (self.num_heads,)
        return {
            self.conv: (self.conv_size, 1, self.kernel),
            f"{self.name}.A_log": heads,
            f"{self.name}.dt_bias": heads,
        }

    @property
    def conv(self) -> str:
        """Name of the weight of the convolution."""
        return f"{self.name}.conv1d.weight"

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are computed, but those that stay dense."""
        return *self.qkv, self.output

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.norm,)

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""
        return self.gates

    @property
    def state_fields(self) -> dict[str, StateField]:
        """The last inputs of the convolution, and a matrix for each head."""
        matrix = self.num_heads, self.key_dim, self.value_dim
        return {"window": StateField((self.kernel - 1, self.conv_size)), "matrix": StateField(matrix, is_exact=True)}


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


HEAD_VECTORS = ("A_log", "D", "dt_bias")
"""Vectors of Mamba-2 with a number for each head: logarithm of the decay, share of the input, offset of the step."""
Recurrent = GatedDeltaNet | ShortConv | Mamba2
"""Any mixer with a state."""
