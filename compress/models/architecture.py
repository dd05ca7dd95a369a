"""Names that compression works with, and their derivation from the description of a model: siblings, places for scales,
and what touches the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from compress.models.block import Block
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.latent import Latent
from compress.models.mlp import MLP, Mixture
from compress.models.norm import Norm
from compress.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SmoothingMapping:
    """A place where a per-channel scale moves exactly from the inputs of linears into the layer that feeds them.

    Names are relative to one block.

    Attributes:
        smooth_layer: norm whose weight, or linear whose output rows, are divided by the scale.
        balance_layers: linears that read its output and nothing else; their input columns are multiplied.
        parent: module whose output shows what a change of the balance layers does.
        offset: what a norm adds to its stored weight.
        routers: linears that read the output too; their columns are multiplied, although they stay dense.
        observed: module whose input statistics count; empty for the first of the balance layers. Tokens reach all
            experts of a mixture together, not each of them.
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    parent: str
    offset: float = 0.0
    routers: tuple[str, ...] = ()
    observed: str = ""


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
        final_norm: norm before the head; empty when it is unknown.
        head: output projection; empty when there is none.
        siblings: linears of a block that share one input and that engines fuse, so they must share one scheme.
        mappings: smoothing mappings, in the order in which they are folded.
        stream: what touches the residual stream; None where it cannot be rotated.
        routers: linears of a block that stay dense: a rounded router sends tokens to other experts.
        experts: linears of all experts of a mixture but shared ones, which engines multiply at once with one scheme.
    """

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    siblings: tuple[tuple[str, ...], ...] = ()
    mappings: tuple[SmoothingMapping, ...] = ()
    stream: ResidualStream | None = None
    routers: tuple[str, ...] = ()
    experts: tuple[tuple[str, ...], ...] = ()

    def mappings_of(self, linears: Set[str]) -> list[SmoothingMapping]:
        """Returns the mappings of a block that has these linears, where blocks of several kinds have their own."""
        present = [each for each in self.mappings if linears >= set(each.balance_layers)]
        return [each for each in present if not any(_is_part(each, other) for other in present)]


def _is_part(mapping: SmoothingMapping, other: SmoothingMapping) -> bool:
    same = mapping.smooth_layer == other.smooth_layer
    return same and set(mapping.balance_layers) < set(other.balance_layers)


def smooths_norms(spec: ModelSpec) -> bool:
    """Whether scales can move from the inputs of linears into a norm before them, in any block."""
    return any(
        mapping.smooth_layer == norm.name
        for block in spec.blocks
        for mapping in smoothing_mappings(block)
        for norm in block.norms
    )


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
        routers=_distinct(linear.name for block in spec.blocks for linear in block.routers),
        experts=_distinct(
            tuple(linear.name for mlp in block.mlp.experts for linear in mlp.linears)
            for block in spec.blocks
            if isinstance(block.mlp, Mixture)
        ),
    )


def _distinct(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(items))


def siblings(block: Block) -> tuple[tuple[str, ...], ...]:
    """Groups of linears that share one input and that engines fuse."""
    groups = (*(mixer.qkv for mixer in block.mixers), *(mlp.inputs for mlp in block.mlps))
    return tuple(_names(group) for group in groups if len(group) > 1)


def smoothing_mappings(block: Block) -> tuple[SmoothingMapping, ...]:
    """Derives a block's smoothing mappings; none where projections are stored as one, as their rows differ in role.

    Norms of query and key heads follow the projections and do not see a scale on their inputs. A norm that mixer and
    MLP, two mixers or the residual stream read has no mapping, as no module shows what a change does to both.
    """
    mlp = block.mlp
    first, second = (None, None) if block.is_parallel or _norms_replace(block) else (block.input_norm, block.mlp_norm)
    first = None if block.second is not None else first
    found = _attention_mappings(first, block.mixer) if isinstance(block.mixer, Attention) else _reader(first, block)
    if mlp is None:
        return found
    split = [each for each in block.mlps if len(each.inputs) > 1 or not each.gated]
    if len(split) < len(block.mlps):
        return found + tuple(mapping for each in split for mapping in _mlp_mappings(None, each))
    return found + (_mixture_mappings(second, mlp) if isinstance(mlp, Mixture) else _mlp_mappings(second, mlp))


def _attention_mappings(norm: Norm | None, mixer: Attention) -> tuple[SmoothingMapping, ...]:
    """Derives those of attention; a norm of values, or values of another layer, let no scale through."""
    is_fused = len(mixer.qkv) == 1 and mixer.kv_layer is None
    found = () if is_fused else _mappings(norm, mixer.qkv, mixer.output, mixer.name)
    if norm is not None and mixer.head_gate is not None:
        gates = _names(mixer.routers)
        found = tuple(replace(each, routers=gates) if each.smooth_layer == norm.name else each for each in found)
    if mixer.value_norm is None and mixer.kv_layer is None and mixer.latent is None:
        return found
    found = tuple(each for each in found if each.parent == mixer.name)
    return found if mixer.latent is None else _latent_mappings(found, mixer.latent, mixer.name)


def _reader(norm: Norm | None, block: Block) -> tuple[SmoothingMapping, ...]:
    """Derives the one from a norm to a recurrent mixer, whose output projection reads normalized heads."""
    mixer = block.mixer
    if norm is None or mixer is None:
        return ()
    routers = [linear for linear in mixer.routers if not linear.is_inner]
    return (SmoothingMapping(norm.name, _names(mixer.qkv), mixer.name, norm.offset, _names(routers)),)


def _latent_mappings(before: tuple[SmoothingMapping, ...], latent: Latent, parent: str) -> tuple[SmoothingMapping, ...]:
    """Derives those of latent attention; rows of keys and values take turns in the expansion, so none ends in the
    output. `before`: from the norm before attention, which an indexer reads as well, as it does the latents of
    queries."""
    linears = (latent.expansion,) if latent.query is None else (latent.query, latent.expansion)
    pairs = list(zip(latent.norms, linears, strict=False))
    inside = [SmoothingMapping(norm.name, (linear.name,), linear.name) for norm, linear in pairs]
    if latent.indexer is None:
        return (*before, *inside)
    key, routers = (latent.indexer.key.name,), _names(latent.routers)
    inside[0] = replace(inside[0], balance_layers=(*inside[0].balance_layers, latent.indexer.query.name), parent=parent)
    first = (replace(each, balance_layers=(*each.balance_layers, *key), routers=routers) for each in before)
    return (*first, *inside)


def _mlp_mappings(norm: Norm | None, mlp: MLP) -> tuple[SmoothingMapping, ...]:
    """Derives those of an MLP; a clamped gate, which adds to its input, lets no scale through."""
    found = _mappings(norm, mlp.inputs, mlp.down, mlp.name)
    return found if mlp.clamped is None else tuple(each for each in found if each.parent == mlp.name)


def _mixture_mappings(norm: Norm | None, mixture: Mixture) -> tuple[SmoothingMapping, ...]:
    """Derives one from the norm to all that reads it, and those inside each expert."""
    narrow = mixture.around[:1]
    readers = mixture.mlps[len(mixture.experts) :] if narrow else mixture.mlps
    read = *narrow, *(linear for mlp in readers for linear in mlp.inputs)
    inside = tuple(each for mlp in mixture.mlps for each in _mlp_mappings(None, mlp))
    if norm is None:
        return inside
    routers, experts = _names(mixture.routers), "" if narrow else mixture.experts[0].name.rpartition(".")[0]
    before = SmoothingMapping(norm.name, _names(read), mixture.name, norm.offset, routers, experts)
    return before, *inside


def _mappings(
    norm: Norm | None, inputs: tuple[Linear, ...], output: Linear, parent: str
) -> tuple[SmoothingMapping, ...]:
    """Derives those of attention or of an MLP; the last of several inputs feeds the output without an activation."""
    before = () if norm is None else (SmoothingMapping(norm.name, _names(inputs), parent, norm.offset),)
    inside = (SmoothingMapping(inputs[-1].name, (output.name,), output.name),) if len(inputs) > 1 else ()
    return before + inside


def is_pre_norm(block: Block) -> bool:
    """Whether mixer and MLP read the residual stream through plain norms and add to it without one."""
    read = block.input_norm, block.mlp_norm
    if _norms_replace(block) or not all(norm is not None and norm.is_plain for norm in read):
        return False
    return block.output_norm is block.mlp_output_norm is None


def _norms_replace(block: Block) -> bool:
    """Whether what norms give takes the place of the residual stream."""
    return block.residual is not None and block.residual.kept is not None


def residual_stream(block: Block) -> ResidualStream | None:
    """Derives what touches a block's residual stream; None where value rows are not stored apart, or where more than
    root mean square norms lie between the stream and the linears."""
    mixer, mlp = block.mixer, block.mlp
    if not isinstance(mixer, Attention) or not isinstance(mlp, MLP) or block.second or not is_pre_norm(block):
        return None
    if len(mixer.qkv) != 3 or len(mlp.inputs) != 2 or mixer.head_gate is not None:
        return None
    return ResidualStream(
        readers=tuple(
            (norm.name, _names(linears))
            for norm, linears in ((block.input_norm, mixer.qkv), (block.mlp_norm, mlp.inputs))
            if norm is not None
        ),
        writers=(mixer.output.name, mlp.down.name),
        values=(mixer.qkv[2].name, mixer.output.name),
    )


def _names(linears: Sequence[Linear]) -> tuple[str, ...]:
    return tuple(linear.name for linear in linears)
