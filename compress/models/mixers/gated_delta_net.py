"""Gated delta nets (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.linear import Linear
from compress.models.norm import Norm
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
