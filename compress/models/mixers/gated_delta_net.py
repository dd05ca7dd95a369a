"""Gated delta nets (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from compress.models.cuts import Cuts, moved, scaled, size, stacked
from compress.models.linear import Linear
from compress.models.mixers.mixer import ConvolvedMixer
from compress.models.norm import Norm


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(ConvolvedMixer):
    """Linear attention by the gated delta rule (arXiv:2412.06464) after a short causal convolution.

    Attributes:
        num_heads, num_key_heads: value heads, and heads of queries and keys, each of which serves as many value heads.
        qkv: projections of queries, keys, values and output gates, in this order.
        gates: projections of the strength of each update (beta) and of the decay, in this order; stay dense.
        norm: over each value head, before its gate.
        grouped: rows of a projection are sorted by key head, not by what they project.
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
    def own_vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its decay and offset of the decay by tensor name."""
        return {f"{self.name}.A_log": (self.num_heads,), f"{self.name}.dt_bias": (self.num_heads,)}

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.norm,)

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""
        return self.gates

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim

    def cut(self, cuts: Cuts) -> Self:
        """Cuts all by value head, which a head of queries and keys goes with."""
        heads, keys = cuts.groups(self.num_key_heads, self._shared, self.output, self.value_dim)
        key = scaled(keys, self.key_dim), self.num_key_heads * self.key_dim
        value = scaled(heads, self.value_dim), self.num_heads * self.value_dim
        channels = stacked(key, key, value)
        self.cut_conv(cuts, *channels)
        for name in self.own_vectors:
            cuts.vector(name, heads)
        qkv: tuple[Linear, ...]
        if self.grouped:
            qkv, gates = self._cut_grouped(cuts, heads, keys)
        else:
            qkv = cuts.rows(self.qkv[0], *channels), cuts.rows(self.qkv[1], value[0])
            gates = tuple(cuts.rows(linear, heads) for linear in self.gates)
        output = cuts.columns(self.output, value[0])
        return replace(self, num_heads=size(heads), num_key_heads=size(keys), qkv=qkv, gates=gates, output=output)

    @property
    def _shared(self) -> int:
        """Value heads of a key head."""
        return self.num_heads // self.num_key_heads

    def _cut_grouped(self, cuts: Cuts, heads: slice, keys: slice) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
        """Cuts projections that are sorted by key head: all of several key heads, or a part of one."""
        shared, first = self._shared, heads.start - keys.start * self._shared
        own = slice(first, min(first + size(heads), shared))
        key, value = (slice(0, self.key_dim), self.key_dim), (scaled(own, self.value_dim), shared * self.value_dim)

        def rows(linear: Linear, *parts: tuple[slice, int]) -> Linear:
            width, each = linear.out_features // self.num_key_heads, range(keys.start, keys.stop)
            return cuts.rows(linear, *(moved(part, head * width) for head in each for part in stacked(*parts)))

        return (rows(self.qkv[0], key, key, value, value),), (rows(self.gates[0], (own, shared), (own, shared)),)
