"""Causal attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from compress.models.cuts import Cuts, scaled, size, stacked
from compress.models.linear import Linear
from compress.models.mixers.mixer import Mixer
from compress.models.norm import Norm, NormShare
from compress.models.rope import Rope

if TYPE_CHECKING:
    from compress.models.block_parts import PositionScale
    from compress.models.mixers.latent import Latent


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Causal grouped-query attention.

    Attributes:
        qkv: projections of queries, keys and values in this order; a single linear where they are stored as one.
        rope: None for no positions.
        qk_norm: norms of queries and keys, over each head or over all heads at once, as their size says.
        norms_rotated: `qk_norm` comes after the rotary embedding instead of before it.
        scale: factor on scores; None is `head_dim ** -0.5`.
        softcap: scores s become `softcap * tanh(s / softcap)` before they are masked; None leaves them.
        position_scale: growth of queries with their position, see `PositionScale`.
        window: tokens, itself included, that a token attends to; None is all.
        chunk: a token attends to those of its own chunk of this many tokens only; None is one chunk.
        sink_logits: name of a vector with a score for each head that takes part in the softmax and belongs to no token
            (arXiv:2508.10925); "" for none.
        kv_layer: earlier layer whose keys and values it reads; then `qkv` and `qk_norm` are those of queries alone.
        value_norm: norm over each value head.
        value_is_key: values are keys as projected, before their norm and rotation; `qkv` has no linear for them.
        output_gate: the first of `qkv` gives each query head and then its gate, whose sigmoid multiplies the output.
        head_gate: a number for each head, whose sigmoid multiplies the output of the head; stays dense.
        latent: what keys and values of all heads are computed from; then `num_kv_heads` is 1, and `qkv` has a linear
            for queries, or for the latents of queries, and one for that of keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: tuple[Linear, ...]
    output: Linear
    rope: Rope | None
    qk_norm: tuple[Norm, ...] | None = None
    norms_rotated: bool = False
    scale: float | None = None
    softcap: float | None = None
    position_scale: PositionScale | None = None
    window: int | None = None
    chunk: int | None = None
    sink_logits: str = ""
    kv_layer: int | None = None
    value_norm: Norm | None = None
    value_is_key: bool = False
    output_gate: bool = False
    head_gate: Linear | None = None
    latent: Latent | None = None
    name: str = "self_attn"

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """Its rotary embedding and the size of the heads that it rotates."""
        size = self.head_dim if self.latent is None else self.latent.rotated
        return None if self.rope is None else (self.rope, size)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are computed."""
        return *self.qkv, *(() if self.latent is None else self.latent.linears), self.output

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those inside of it."""
        value = () if self.value_norm is None else (self.value_norm,)
        return *value, *(self.qk_norm or ()), *(() if self.latent is None else self.latent.norms)

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Channels of a key and of a value as they are kept for later tokens."""
        return (self.head_dim, self.head_dim) if self.latent is None else (self.latent.rotated, self.latent.rank)

    @property
    def widest_head(self) -> int:
        """Channels of the widest form of a query: of one that looks at latents, as many as those and a rotated key."""
        return self.head_dim if self.latent is None else max(self.head_dim, self.latent.width)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its sink logits by tensor name."""
        return {self.sink_logits: (self.num_heads,)} if self.sink_logits else {}

    @property
    def own_kv_heads(self) -> int:
        """Key-value heads that it computes itself."""
        return self.num_kv_heads if self.kv_layer is None else 0

    @property
    def routers(self) -> tuple[Linear, ...]:
        gates = () if self.head_gate is None else (self.head_gate,)
        return gates if self.latent is None else self.latent.routers

    def cut(self, cuts: Cuts) -> Self:
        """Cuts queries, keys, values and gates by head; a key-value head goes with the query heads that read it."""
        if self.latent is not None:
            return self._cut_latent(cuts, self.latent)
        queries, keys = cuts.groups(self.num_kv_heads, self._shared, self.output, self.head_dim)
        if self.sink_logits:
            cuts.vector(self.sink_logits, queries)
        return replace(
            self,
            num_heads=size(queries),
            num_kv_heads=size(keys),
            qkv=self._cut_qkv(cuts, queries, keys),
            output=cuts.columns(self.output, scaled(queries, self.head_dim)),
            qk_norm=self._cut_norms(cuts, queries, keys),
            head_gate=None if self.head_gate is None else cuts.rows(self.head_gate, queries),
        )

    @property
    def _shared(self) -> int:
        """Query heads that read a key-value head."""
        return self.num_heads // self.num_kv_heads

    def _cut_qkv(self, cuts: Cuts, queries: slice, keys: slice) -> tuple[Linear, ...]:
        width = self.head_dim * (1 + self.output_gate)
        parts = [(scaled(queries, width), self.num_heads * width)]
        if self.kv_layer is None:
            key = scaled(keys, self.head_dim), self.num_kv_heads * self.head_dim
            parts += [key] if self.value_is_key else [key, key]
        if len(self.qkv) == 1:
            return (cuts.rows(self.qkv[0], *stacked(*parts)),)
        return tuple(cuts.rows(linear, part) for linear, (part, _) in zip(self.qkv, parts, strict=True))

    def _cut_norms(self, cuts: Cuts, queries: slice, keys: slice) -> tuple[Norm, ...] | None:
        """Cuts norms over all heads at once. Where several ranks have a key head, one adds its squares."""
        if self.qk_norm is None or all(norm.size == self.head_dim for norm in self.qk_norm):
            return self.qk_norm
        first = queries.start == keys.start * self._shared
        return tuple(
            cuts.norm(norm, scaled(part, self.head_dim), NormShare(norm.size, is_added=is_added))
            for norm, part, is_added in zip(self.qk_norm, (queries, keys), (True, first), strict=False)
        )

    def _cut_latent(self, cuts: Cuts, latent: Latent) -> Self:
        """Cuts what makes queries, keys and values of latents by head; every rank has latents and indexer whole."""
        heads = cuts.share(self.num_heads, self.output, latent.value_dim)
        queries = scaled(heads, self.head_dim)
        first, *others = self.qkv
        return replace(
            self,
            num_heads=size(heads),
            qkv=(cuts.rows(first, queries) if latent.query is None else first, *others),
            output=cuts.columns(self.output, scaled(heads, latent.value_dim)),
            latent=replace(
                latent,
                query=None if latent.query is None else cuts.rows(latent.query, queries),
                expansion=cuts.rows(latent.expansion, scaled(heads, latent.expansion.out_features // self.num_heads)),
            ),
        )
