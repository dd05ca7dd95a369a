"""Families that are not registered: their blocks are found by structure, and nothing else of them is known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from compress.common.errors import CheckpointError, ToolkitError
from compress.models.architecture import Architecture
from compress.models.block import Block
from compress.models.cuts import REMEDY, Cuts
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mlp import MLP
from compress.models.norm import Norm
from compress.models.spec import ModelSpec, TensorNames


@dataclass(frozen=True, slots=True)
class CodeSpec(ModelSpec):
    """A decoder that its own modeling code computes: sizes, but nothing that could be interpreted.

    Attributes:
        blocks: one for each call of attention, in order, with its heads and its window.
        context_length: longest sequence the model was made for; None where it is not said.
        other_elements: elements of all parameters but linears, embedding and head.
    """

    modules: tuple[Linear, ...] = ()
    context_length: int | None = None
    other_elements: int = 0

    def linears(self) -> Iterator[Linear]:
        yield from self.modules

    def cut(self, cuts: Cuts) -> ModelSpec:
        raise ToolkitError("ranks cannot share this model: its own modeling code computes it", REMEDY)


SINKS = "s_aux"
"""Argument by which modeling code gives sink logits to attention, in the place of the name of a tensor."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one call of attention, and what they may look at; see `Attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool = False


def code_spec(
    hidden_size: int,
    vocab_size: int,
    calls: Collection[Heads],
    modules: tuple[Linear, ...],
    names: TensorNames,
    *,
    tied: bool,
    context_length: int | None,
    other_elements: int,
) -> CodeSpec:
    """Composes the description of a decoder that its own modeling code computes."""
    widest = max((max(linear.shape) for linear in modules), default=4 * hidden_size)
    mlp = MLP((), Linear("", hidden_size, widest))
    return CodeSpec(
        hidden_size,
        vocab_size,
        tuple(Block(None, _mixer(hidden_size, heads), None, mlp) for heads in calls),
        Norm("", hidden_size, 0.0),
        tied,
        names=names,
        modules=modules,
        context_length=context_length,
        other_elements=other_elements,
    )


def _mixer(hidden_size: int, heads: Heads) -> Attention:
    output = Linear("", hidden_size, heads.num_heads * heads.head_dim)
    sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
    sinks = SINKS if heads.has_sinks else ""
    return Attention(*sizes, (), output, None, window=heads.window, softcap=heads.softcap, sink_logits=sinks)


def architecture_by_structure(
    model_type: str, lists: Mapping[str, int], linears: Collection[str], embedding: str, head: str
) -> Architecture:
    """Takes the longest outermost module list with linears for the transformer blocks. No siblings, no mappings. Raises
    CheckpointError: no module list that could be the transformer blocks.

    Args:
        lists: length of every module list by name, outer ones first.
        embedding, head: names of these modules; empty when there is none.
    """
    outermost = _outermost(lists, linears)
    if not outermost:
        raise CheckpointError(
            f"model type {model_type!r} has no module list of transformer blocks with linear layers",
            "Only decoder-only models built that way can be compressed",
        )
    return Architecture(max(outermost, key=lambda name: lists[name]), embedding, final_norm="", head=head)


def _outermost(lists: Mapping[str, int], linears: Collection[str]) -> list[str]:
    """Lists that hold linears and do not lie inside another one, as a list of experts does."""
    found: list[str] = []
    for name in lists:
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and any(linear.startswith(f"{name}.") for linear in linears):
            found.append(name)
    return found
