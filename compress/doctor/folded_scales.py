"""Scales that smoothing folds into linears and the layers before them, and comparison that allows for them.

AWQ and SmoothQuant multiply columns of linears by a scale per channel and divide the layer that feeds them by it.
The scale of a norm is the quotient of its weights and those of the source. That of a linear is fitted to its rows, and
to the columns of the linear that reads them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.models.architecture import smoothing_mappings
from compress.models.block import Block
from compress.models.mixers.attention import Attention
from compress.models.spec import ModelSpec

COLUMNS, ROWS = 0, 1
"""Dimension over which inner products are summed, for one of each column or row."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two linears with one scale per channel: in the rows of one, and inverted in the columns of its reader.
    `head_dim`: channels of a value head, which several heads of the reader share; 1 without heads."""

    rows: str
    columns: str
    head_dim: int = 1


@dataclass(frozen=True, slots=True)
class Folding:
    """Scales that one linear may contain.

    Attributes:
        offset: what this norm adds to its stored weight.
        pair: the pair that this linear is part of, whose scales are fitted.
        fitted: `ROWS` or `COLUMNS` of this linear, for its part of the pair.
    """

    norm: str = ""
    offset: float = 0.0
    pair: Pair | None = None
    fitted: int | None = None


def foldings(spec: ModelSpec) -> dict[str, Folding]:
    """Returns the scales of every linear that smoothing changes, by absolute name."""
    found: defaultdict[str, Folding] = defaultdict(Folding)
    for index, block in enumerate(spec.blocks):
        norms = {norm.name for norm in block.norms}
        for mapping in smoothing_mappings(block):
            names = mapping.smooth_layer, *mapping.balance_layers, *mapping.routers
            before, *readers = (f"{spec.block_name(index)}.{name}" for name in names)
            if mapping.smooth_layer in norms:
                found |= {name: replace(found[name], norm=before, offset=mapping.offset) for name in readers}
                continue
            pair = Pair(before, readers[0], _head_dim(block, readers[0]))
            found[pair.rows] = replace(found[pair.rows], pair=pair, fitted=ROWS)
            found[pair.columns] = replace(found[pair.columns], pair=pair, fitted=COLUMNS)
    return found


def _head_dim(block: Block, reader: str) -> int:
    """Returns the channels of a value head for the output projection of attention; 1 for other linears."""
    mixer = block.mixer
    return mixer.head_dim if isinstance(mixer, Attention) and reader.endswith(f".{mixer.output.name}") else 1


def norm_scale(ours: Tensor, theirs: Tensor, offset: float) -> Tensor:
    """Returns the scale `[I]` that a norm passed to its readers; 0 for channels that it mutes before and after."""
    ours, theirs = ours.float() + offset, theirs.float() + offset
    return torch.where((ours == 0) & (theirs == 0), 0.0, theirs / ours)


@dataclass(frozen=True, slots=True)
class Products:
    """Inner products of the lines of a matrix and its source: rows or columns `[n]`, or all values `[1]`, float64.

    Attributes:
        ours, theirs: of a line with itself.
        mixed: of a line with its source.
        is_fitted: whether each line has an unknown scale.
    """

    ours: Tensor
    mixed: Tensor
    theirs: Tensor
    is_fitted: bool

    @classmethod
    def of(cls, panels: Iterable[tuple[Tensor, Tensor]], scale: Tensor | None, fitted: int | None) -> Products:
        """Sums over panels of rows of both matrices.

        Args:
            panels: rows of the matrix and of its source, `[rows, I]`.
            scale: `[I]`, factors of the source's columns; see `norm_scale`.
            fitted: lines that have an unknown scale; see `Folding`.
        """
        parts = list(_line_products(panels, scale, fitted))
        ours, mixed, theirs = (torch.cat(each) if fitted == ROWS else sum(each) for each in zip(*parts, strict=True))
        return cls(ours, mixed, theirs, fitted is not None)

    @property
    def similarity(self) -> float:
        """Cosine of the angle between the matrix and its source: near 0 for unrelated ones."""
        if self.is_fitted:
            return math.sqrt(_ratio(self._explained, self.ours))
        return float(self.mixed.sum()) / math.sqrt(float(self.ours.sum() * self.theirs.sum()) or 1.0)

    @property
    def relative_error(self) -> float:
        """Frobenius norm of the difference, divided by that of the source or, if scales are fitted, of the matrix."""
        if self.is_fitted:
            return math.sqrt(_ratio(self.ours - self._explained, self.ours))
        return math.sqrt(_ratio(self.ours - 2 * self.mixed + self.theirs, self.theirs))

    @property
    def _explained(self) -> Tensor:
        """Share of `ours` that the best scale of each line explains."""
        return self.mixed.clamp(min=0).square() / self.theirs.clamp(min=torch.finfo(torch.float64).tiny)


def _line_products(
    panels: Iterable[tuple[Tensor, Tensor]], scale: Tensor | None, fitted: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for ours, theirs in panels:
        ours, theirs = ours.double(), theirs.double()
        if scale is not None:
            ours, theirs = ours * (scale != 0), theirs * scale
        products = ours.square(), ours * theirs, theirs.square()
        first, second, third = (each.sum().view(1) if fitted is None else each.sum(fitted) for each in products)
        yield first, second, third


def _ratio(part: Tensor, whole: Tensor) -> float:
    """Returns the quotient of two sums, at least 0; the first sum if the second is 0."""
    return max(float(part.sum()), 0.0) / (float(whole.sum()) or 1.0)


def pair_error(rows: Products, columns: Products, head_dim: int) -> float:
    """Returns the relative error of the products of every row with the columns that read it, where scales cancel."""
    shared = len(columns.ours) // len(rows.ours)

    def summed(first: Tensor, second: Tensor) -> float:
        spread = first.view(-1, 1, head_dim).expand(-1, shared, -1).reshape(-1)
        return float(spread @ second)

    whole = summed(rows.theirs, columns.theirs)
    difference = summed(rows.ours, columns.ours) - 2 * summed(rows.mixed, columns.mixed) + whole
    return math.sqrt(max(difference, 0.0) / (whole or 1.0))
