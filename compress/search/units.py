"""What the search decides about: linears that share one fate. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.architectures.architecture import Architecture

EMBEDDING = -1
"""Index that stands for a block before the first."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One linear, or siblings that engines fuse and that therefore share a form.

    Attributes:
        block: index of the block it stands in; of the token embedding `EMBEDDING`, of the head the number of blocks.
        modules: full names.
        shapes: `(O, I)` of each.
    """

    block: int
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return self.modules[0]

    @property
    def weights(self) -> int:
        return sum(map(math.prod, self.shapes))


def units_of(blocks: Sequence[str], linears: Mapping[str, tuple[int, int]], architecture: Architecture) -> list[Unit]:
    """Units in the order of the model.

    Args:
        blocks: names of the blocks.
        linears: shapes of the linears to decide about, by full name.
    """
    units = []
    for index, block in enumerate(blocks):
        inside = [name for name in linears if name.startswith(f"{block}.")]
        leader = {
            f"{block}.{name}": f"{block}.{siblings[0]}" for siblings in architecture.siblings for name in siblings
        }
        groups: dict[str, list[str]] = {}
        for name in inside:
            groups.setdefault(leader.get(name, name), []).append(name)
        units += [Unit(index, tuple(modules), tuple(linears[name] for name in modules)) for modules in groups.values()]
    return units
