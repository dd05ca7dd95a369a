"""Selective state space models of Mamba-2 (arXiv:2405.21060)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from compress.models.cuts import Cuts, scaled, size, stacked
from compress.models.linear import Linear
from compress.models.mixers.mixer import ConvolvedMixer
from compress.models.norm import Norm, NormShare

HEAD_VECTORS = ("A_log", "D", "dt_bias")
"""Vectors of Mamba-2 with a number for each head: logarithm of the decay, share of the input, offset of the step."""


@dataclass(frozen=True, slots=True)
class Mamba2(ConvolvedMixer):
    """A selective state space model (Mamba-2, arXiv:2405.21060) after a short causal convolution.

    Attributes:
        num_heads, num_groups: heads, and groups of them that share what goes into and comes out of the state.
        state_size: numbers that the state keeps for each channel.
        qkv: one projection, of gates, heads, inputs and outputs of the state, and steps, in this order.
        norm: over the heads of each group, after their gate; None for none.
        norms_before_gate: the gate comes after the norm.
        step_limits: least and largest step.
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
        return sum(self.sizes[1:4])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the five parts of the projection."""
        return self.inner_size, self.inner_size, *(2 * (self.num_groups * self.state_size,)), self.num_heads

    @property
    def own_vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its decay, step and skipped share by tensor name."""
        return {f"{self.name}.{part}": (self.num_heads,) for part in HEAD_VECTORS}

    @property
    def norms(self) -> tuple[Norm, ...]:
        return () if self.norm is None else (self.norm,)

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.num_heads, self.state_size, self.head_dim

    def cut(self, cuts: Cuts) -> Self:
        """Cuts all by head; what goes into and comes out of the state by group, which several ranks may have."""
        shared = self.num_heads // self.num_groups
        heads, groups = cuts.groups(self.num_groups, shared, self.output, self.head_dim)
        own, group = scaled(heads, self.head_dim), scaled(groups, self.state_size)
        parts = (*zip((own, own, group, group, heads), self.sizes, strict=True),)
        self.cut_conv(cuts, *stacked(*parts[1:4]))
        for name in self.own_vectors:
            cuts.vector(name, heads)
        share = None
        if self.num_groups < cuts.rank.count:
            share = NormShare(shared * self.head_dim, groups.start, self.num_groups)
        return replace(
            self,
            num_heads=size(heads),
            num_groups=size(groups),
            qkv=(cuts.rows(self.qkv[0], *stacked(*parts)),),
            output=cuts.columns(self.output, own),
            norm=None if self.norm is None else cuts.norm(self.norm, own, share),
        )
