"""What the pipeline must know about a model family: names, and nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SmoothingMapping:
    """A place where a per-channel scale can be moved exactly from a layer's input into what feeds it.

    Names are relative to one block.

    Attributes:
        smooth_layer: the norm whose weight, or the linear whose output rows, take `1 / scale`.
        balance_layers: linears that read its output and nothing else; their input columns take `scale`.
        parent: module whose output judges a scale.
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    parent: str


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """Everything of a block that touches the residual stream, where nothing but RMSNorm (times its weight, without an
    offset) comes between it and linears. Names are relative to one block.

    Attributes:
        readers: each norm with the linears that read it.
        writers: linears whose outputs are added to the stream as they are.
        values: the linear that makes the value heads and the one that reads what attention mixes of them.
    """

    readers: tuple[tuple[str, tuple[str, ...]], ...]
    writers: tuple[str, ...]
    values: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of decoder-only models.

    Attributes:
        model_types: the `model_type` values of config.json this entry is for.
        blocks: name of the module list of transformer blocks.
        embedding: name of the token embedding.
        final_norm: name of the norm before the head; empty when the family is not in the table.
        head: name of the output projection; empty when there is none.
        siblings: linears of a block that share one input and that engines fuse, so they must share scheme and fate.
        edges: smoothing edges, in the order in which they are folded.
        stream: what touches the residual stream; None where it cannot be rotated.
    """

    model_types: tuple[str, ...]
    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    siblings: tuple[tuple[str, ...], ...] = ()
    edges: tuple[SmoothingMapping, ...] = ()
    stream: ResidualStream | None = None
