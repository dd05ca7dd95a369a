"""Lightning attention (arXiv:2401.04658)."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.linear import Linear
from compress.models.norm import Norm
from compress.models.state import StateField


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """Linear attention with a fixed decay for each head (arXiv:2401.04658), as in MiniMax-01 (arXiv:2501.08313).

    Attributes:
        head_dim: channels of a head of queries, keys and values.
        qkv: one projection, of query, key and value of each head in turn, and one of the output gate.
        output: reads the heads.
        norm: over all heads, before their gate, whose sigmoid multiplies them.
        decays: logarithm of the factor on the state before each token, one for each head.
        activation: of queries, keys and values.
    """

    num_heads: int
    head_dim: int
    qkv: tuple[Linear, Linear]
    output: Linear
    norm: Norm
    decays: tuple[float, ...]
    activation: str = "silu"
    name: str = "self_attn"

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.qkv, self.output

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Nothing: tables of decays that files hold follow from the number of the layer."""
        return {}

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.norm,)

    @property
    def routers(self) -> tuple[Linear, ...]:
        return ()

    @property
    def state_fields(self) -> dict[str, StateField]:
        """A matrix for each head."""
        return {"matrix": StateField((self.num_heads, self.head_dim, self.head_dim), is_exact=True)}
