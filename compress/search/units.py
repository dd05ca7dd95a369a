"""What the search decides about: linears that share one fate. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.architectures.architecture import Architecture
from compress.checkpoint.errors import SchemeError
from compress.checkpoint.scheme import Scheme
from compress.plan import shape_bytes

EMBEDDING = -1
"""Index that stands for a block before the first."""
_SCALE_BITS = {"float64": 64, "float32": 32}


@dataclass(frozen=True, slots=True)
class Unit:
    """One linear, or siblings that engines fuse and that therefore share a scheme.

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

    def stored_bytes(self, scheme: Scheme, scale_dtype: str) -> int:
        """Of all its tensors in the file."""
        bits = _SCALE_BITS.get(scale_dtype, 16)
        return sum(math.ceil(scheme.stored_bits(*shape, bits) / 8) + shape_bytes(scheme) for shape in self.shapes)

    def takes(self, scheme: Scheme) -> bool:
        """Whether the groups divide all its rows."""
        return scheme.group_size is None or not any(columns % scheme.group_size for _, columns in self.shapes)


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


def menu_for(unit: Unit, menu: Sequence[Scheme]) -> list[Scheme]:
    """The schemes that fit a unit. Raises SchemeError when none does."""
    fitting = [scheme for scheme in menu if unit.takes(scheme)]
    if not fitting:
        widths = ", ".join(str(columns) for _, columns in unit.shapes)
        raise SchemeError(f"no scheme of the menu divides the {widths} inputs of {unit.name}", "Add w8 or w4 to --menu")
    return fitting
