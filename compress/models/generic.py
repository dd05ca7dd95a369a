"""Families that are not registered: their blocks are found by structure, and nothing else of them is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from compress.common.errors import CheckpointError
from compress.models.architecture import Architecture


def architecture_by_structure(
    model_type: str, lists: Mapping[str, int], linears: Collection[str], embedding: str, head: str
) -> Architecture:
    """Takes the longest outermost module list with linears for the transformer blocks. No siblings, no mappings.

    Args:
        lists: length of every module list by name, outer ones first.
        linears: names of all linears.
        embedding, head: names of these modules; empty when there is none.

    Raises:
        CheckpointError: no module list that could be the transformer blocks.
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
