"""Descriptions of decoder-only models, and what follows from them: names, shapes, siblings, mappings, sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix `[out_features, in_features]` and its bias, if it has one.

    Attributes:
        name: relative to the block; absolute in `ModelSpec.linears`.
        split: dimension that tensor parallelism divides: `columns` are output features (Megatron-LM,
            arXiv:1909.08053, section 3), `rows` input features, whose partial products are summed.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    split: Literal["columns", "rows"] = "columns"

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square norm (arXiv:1910.07467) over the last `size` channels, multiplied by its weight."""

    name: str
    size: int
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864): its kind, its base, the share of channels it rotates and what the kind
    needs."""

    type: str
    theta: float
    options: Mapping[str, Any]
    partial: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal grouped-query attention.

    Attributes:
        qkv: projections of queries, keys and values in this order; a single linear where they are stored as one.
        qk_norm: norms over each query head and each key head, before the rotary embedding.
        window: tokens, itself included, that a token attends to; None is all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: tuple[Linear, ...]
    output: Linear
    rope: Rope
    qk_norm: tuple[RMSNorm, RMSNorm] | None = None
    window: int | None = None
    name: str = "self_attn"


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))` (arXiv:2002.05202).

    Attributes:
        gate_up: gate and up in this order; a single linear where they are stored as one.
        activation: name as in config.json.
    """

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: str = "silu"
    name: str = "mlp"


@dataclass(frozen=True, slots=True)
class Block:
    """A pre-norm transformer block: `x += mixer(input_norm(x))`, then `x += mlp(mlp_norm(x))`.

    Other mixers, mixtures of experts and residual arrangements are further classes in these places.
    """

    input_norm: RMSNorm
    mixer: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mixer.qkv, self.mixer.output, *self.mlp.gate_up, self.mlp.down

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return self.input_norm, self.mlp_norm, *(self.mixer.qk_norm or ())


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Absolute names of the parts around the blocks."""

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model, as its config.json defines it.

    Attributes:
        blocks: one per layer, in order.
        final_norm: norm before the head, with its absolute name.
        tied: whether the head multiplies by the embedding.
        logit_scale: factor on logits.
    """

    hidden_size: int
    vocab_size: int
    blocks: tuple[Block, ...]
    final_norm: RMSNorm
    tied: bool = False
    logit_scale: float = 1.0
    names: TensorNames = TensorNames()

    @property
    def head(self) -> Linear:
        return Linear(self.names.head, self.vocab_size, self.hidden_size)

    def block_name(self, index: int) -> str:
        return f"{self.names.blocks}.{index}"

    def linears(self) -> Iterator[Linear]:
        """Linears of all blocks with absolute names, in the order in which they are computed."""
        for index, block in enumerate(self.blocks):
            for linear in block.linears:
                yield replace(linear, name=f"{self.block_name(index)}.{linear.name}")

    def norms(self) -> Iterator[RMSNorm]:
        """All norms, with absolute names."""
        for index, block in enumerate(self.blocks):
            for norm in block.norms:
                yield replace(norm, name=f"{self.block_name(index)}.{norm.name}")
        yield self.final_norm

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shape of every matrix by module name: linears, embedding and head."""
        shapes = {linear.name: linear.shape for linear in (*self.linears(), self.head)}
        return shapes | {self.names.embedding: (self.vocab_size, self.hidden_size)}

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by tensor name; the head is listed even when it is the embedding."""
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in self.matrices().items()}
        shapes |= {f"{linear.name}.bias": (linear.out_features,) for linear in self.linears() if linear.bias}
        return shapes | {f"{norm.name}.weight": (norm.size,) for norm in self.norms()}

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all parameters, stored dense with `itemsize` bytes each; a tied head counts once."""
        tied = self.hidden_size * self.vocab_size if self.tied else 0
        return itemsize * (sum(math.prod(shape) for shape in self.parameters().values()) - tied)

    def kv_token_bytes(self, head_bytes: Callable[[int], int]) -> int:
        """Bytes that the cache holds per token: keys and values of all layers.

        Args:
            head_bytes: bytes of one key head and one value head, by head dimension.
        """
        return sum(block.mixer.num_kv_heads * head_bytes(block.mixer.head_dim) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SmoothingMapping:
    """A place where a per-channel scale moves exactly from the inputs of linears into the layer that feeds them.

    Names are relative to one block.

    Attributes:
        smooth_layer: norm whose weight, or linear whose output rows, are divided by the scale.
        balance_layers: linears that read its output and nothing else; their input columns are multiplied.
        parent: module whose output shows what a change of the balance layers does.
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    parent: str


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """Everything of a block that touches the residual stream, where only RMSNorms lie between it and linears.

    Names are relative to one block.

    Attributes:
        readers: each norm with the linears that read it.
        writers: linears whose outputs are added to the stream.
        values: linear that produces the value heads, and the one that reads what attention mixes of them.
    """

    readers: tuple[tuple[str, tuple[str, ...]], ...]
    writers: tuple[str, ...]
    values: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names that compression works with.

    Attributes:
        blocks: module list of transformer blocks.
        embedding: token embedding.
        final_norm: norm before the head; empty when it is unknown.
        head: output projection; empty when there is none.
        siblings: linears of a block that share one input and that engines fuse, so they must share one scheme.
        mappings: smoothing mappings, in the order in which they are folded.
        stream: what touches the residual stream; None where it cannot be rotated.
    """

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    siblings: tuple[tuple[str, ...], ...] = ()
    mappings: tuple[SmoothingMapping, ...] = ()
    stream: ResidualStream | None = None


def architecture_of(spec: ModelSpec) -> Architecture:
    """Derives the names that compression works with. Layers of several kinds contribute in order of appearance."""
    streams = _distinct(residual_stream(block) for block in spec.blocks)
    return Architecture(
        blocks=spec.names.blocks,
        embedding=spec.names.embedding,
        final_norm=spec.names.final_norm,
        head=spec.names.head,
        siblings=_distinct(group for block in spec.blocks for group in siblings(block)),
        mappings=_distinct(mapping for block in spec.blocks for mapping in smoothing_mappings(block)),
        stream=streams[0] if len(streams) == 1 else None,
    )


def _distinct(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(items))


def siblings(block: Block) -> tuple[tuple[str, ...], ...]:
    """Groups of linears that share one input and that engines fuse."""
    return tuple(_names(group) for group in (block.mixer.qkv, block.mlp.gate_up) if len(group) > 1)


def smoothing_mappings(block: Block) -> tuple[SmoothingMapping, ...]:
    """Derives a block's smoothing mappings; none where projections are stored as one, as their rows differ in role.

    Norms of query and key heads follow the projections and do not see a scale on their inputs.
    """
    if not _is_split(block):
        return ()
    mixer, mlp = block.mixer, block.mlp
    value, up = mixer.qkv[2].name, mlp.gate_up[1].name
    return (
        SmoothingMapping(block.input_norm.name, _names(mixer.qkv), mixer.name),
        SmoothingMapping(value, (mixer.output.name,), mixer.output.name),
        SmoothingMapping(block.mlp_norm.name, _names(mlp.gate_up), mlp.name),
        SmoothingMapping(up, (mlp.down.name,), mlp.down.name),
    )


def residual_stream(block: Block) -> ResidualStream | None:
    """Derives what touches a block's residual stream; None where value rows are not stored apart."""
    if not _is_split(block):
        return None
    mixer, mlp = block.mixer, block.mlp
    return ResidualStream(
        readers=((block.input_norm.name, _names(mixer.qkv)), (block.mlp_norm.name, _names(mlp.gate_up))),
        writers=(mixer.output.name, mlp.down.name),
        values=(mixer.qkv[2].name, mixer.output.name),
    )


def _is_split(block: Block) -> bool:
    return len(block.mixer.qkv) == 3 and len(block.mlp.gate_up) == 2


def _names(linears: Sequence[Linear]) -> tuple[str, ...]:
    return tuple(linear.name for linear in linears)
