"""Kimi delta attention (arXiv:2510.26692)."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.linear import Linear
from compress.models.norm import Norm
from compress.models.state import StateField


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Linear attention by the delta rule with a decay for each channel of a key (arXiv:2510.26692, section 3).

    Attributes:
        head_dim: channels of a head of queries, keys and values.
        qkv: projections of queries, keys and values, in this order, each with a short causal convolution behind it.
        gates: projections to the inner channels of the decay and of the output gate, and of the strength of each
            update (beta), in this order; stay dense.
        decay, gate: read these inner channels; stay dense.
        output: reads the heads.
        norm: over each head, before its gate, whose sigmoid multiplies it.
        kernel: tokens that a convolution sees.
        activation: behind the convolutions.
    """

    num_heads: int
    head_dim: int
    qkv: tuple[Linear, ...]
    gates: tuple[Linear, ...]
    decay: Linear
    gate: Linear
    output: Linear
    norm: Norm
    kernel: int
    activation: str = "silu"
    name: str = "self_attn"

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def convs(self) -> tuple[str, ...]:
        """Names of the weights of the convolutions, in the order of `qkv`."""
        return tuple(f"{self.name}.{part}_conv1d.weight" for part in "qkv")

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its convolutions, decay and offset of the decay by tensor name."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.convs, (self.size, 1, self.kernel))
        return found | {f"{self.name}.A_log": (1, 1, self.num_heads, 1), f"{self.name}.dt_bias": (self.size,)}

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
        return *self.gates, self.decay, self.gate

    @property
    def state_fields(self) -> dict[str, StateField]:
        """The last inputs of the convolutions, and a matrix for each head."""
        matrix = self.num_heads, self.head_dim, self.head_dim
        return {"window": StateField((self.kernel - 1, 3 * self.size)), "matrix": StateField(matrix, is_exact=True)}
