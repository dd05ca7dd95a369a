"""Cuts of a model among ranks, processes that share it: rows and columns of each matrix that one of them holds.

Megatron-LM's scheme (arXiv:1909.08053, section 3): what reads the residual stream is cut by heads or by inner channels,
what adds to it by the same columns, and ranks sum what they add. Every description cuts itself, by its method `cut`.
Sizes need not divide: a rank has a head, a group of columns or a row more than another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import gcd, lcm

from compress.common.errors import ToolkitError
from compress.models.linear import Linear
from compress.models.norm import Norm, NormShare

CHANNELS = 32
"""Inner channels are cut at multiples of this where possible, which all kernels take."""

REMEDY = "Leave out --tensor-parallel-size"

Multiple = Callable[[str], int]
"""Gives the multiple of columns at which the stored form of a matrix can be cut, by its full name."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Number of a process among those that share a model.

    Attributes:
        has_whole_experts: holds some experts of each mixture whole, instead of a part of every one.
    """

    index: int = 0
    count: int = 1
    has_whole_experts: bool = False

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def share(self, total: int, unit: int = 1) -> slice:
        """Returns the part of `total` that this rank has, in multiples of `unit`, which divides it."""
        units = total // unit
        start, stop = (units * index // self.count * unit for index in (self.index, self.index + 1))
        return slice(start, stop)


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a matrix `[O, I]`, or of a vector `[O]`.

    Attributes:
        rows: parts of the outputs, in order; () for all.
        columns: part of the inputs; None for all.
        padding: columns at both ends that other ranks multiply, and this one by zeros: groups are not divided.
    """

    rows: tuple[slice, ...] = ()
    columns: slice | None = None
    padding: tuple[int, int] = (0, 0)


def size(part: slice) -> int:
    """Returns the length of a slice."""
    return int(part.stop - part.start)


def scaled(part: slice, width: int) -> slice:
    """Returns the rows or columns of some heads."""
    return slice(part.start * width, part.stop * width)


def moved(part: slice, by: int) -> slice:
    """Returns a slice that begins later."""
    return slice(part.start + by, part.stop + by)


def stacked(*parts: tuple[slice, int]) -> tuple[slice, ...]:
    """Returns parts of matrices in the one that has them above each other; with each the rows of its whole matrix."""
    first = (0, *accumulate(rows for _, rows in parts))
    return tuple(moved(part, start) for start, (part, _) in zip(first, parts, strict=False))


@dataclass(frozen=True, slots=True)
class Cuts:
    """Cuts of one rank, which descriptions make of their matrices, vectors and norms.

    Attributes:
        multiple: where columns can be cut.
        found: cuts by the full name of the matrix or vector; what is not among them is held by every rank.
        prefix: in front of the names of descriptions.
    """

    rank: Rank
    multiple: Multiple
    found: dict[str, Cut] = field(default_factory=dict)
    prefix: str = ""

    def inside(self, module: str) -> Cuts:
        """Returns those of what is inside of a module."""
        return replace(self, prefix=f"{self.prefix}{module}.")

    def share(self, total: int, output: Linear, width: int = 1) -> slice:
        """Returns the heads or channels of this rank. See `groups`."""
        return self.groups(total, 1, output, width)[0]

    def groups(self, count: int, members: int, output: Linear, width: int = 1) -> tuple[slice, slice]:
        """Returns the heads of this rank, and their groups, such as key-value heads with all queries that read them:
        whole groups, or where there are fewer than ranks, one that several ranks have, and some of its heads.

        Args:
            count, members: groups, and heads of each.
            output: reads `width` columns of every head. Heads are kept together for the multiple of its columns where
                enough are left to share.

        Raises:
            ToolkitError: fewer heads than ranks.
        """
        ranks, index = self.rank.count, self.rank.index
        if count * members < ranks:
            raise ToolkitError(
                f"{ranks} ranks cannot share {count * members} heads or channels, which "
                f"{self.prefix}{output.name} reads",
                f"Use --tensor-parallel-size {count * members} or less",
            )
        if count >= ranks:
            own = self.rank.share(count, self._unit(count, members * width, output))
            return scaled(own, members), own
        group = index * count // ranks
        sharing = [each for each in range(ranks) if each * count // ranks == group]
        own = Rank(index - sharing[0], len(sharing)).share(members)
        return moved(own, group * members), slice(group, group + 1)

    def _unit(self, count: int, width: int, output: Linear) -> int:
        """Returns the largest of some multiples of heads of which every rank gets one."""
        multiple = self.multiple(f"{self.prefix}{output.name}")
        for columns in (lcm(multiple, CHANNELS), multiple, CHANNELS):
            unit = columns // gcd(columns, width)
            if count % unit == 0 and count // unit >= self.rank.count:
                return unit
        return 1

    def experts(self, count: int, mixture: str) -> slice:
        """Returns the experts of this rank. Raises ToolkitError for fewer than ranks."""
        if count < self.rank.count:
            raise ToolkitError(
                f"{self.rank.count} ranks cannot share the {count} experts of {self.prefix}{mixture}",
                f"Use --tensor-parallel-size {count} or less, or leave out --enable-expert-parallel",
            )
        return self.rank.share(count)

    def rows(self, linear: Linear, *rows: slice) -> Linear:
        """Cuts the outputs of a linear."""
        self.vector(linear.name, *rows)
        self.vector(f"{linear.name}.bias", *rows)
        return replace(linear, out_features=sum(map(size, rows)))

    def columns(self, linear: Linear, columns: slice) -> Linear:
        """Cuts the inputs of a linear whose products ranks sum, so that one of them adds the bias."""
        multiple = self.multiple(f"{self.prefix}{linear.name}")
        start = columns.start // multiple * multiple
        stop = min(-(-columns.stop // multiple) * multiple, linear.in_features)
        padding = columns.start - start, stop - columns.stop
        self.found[f"{self.prefix}{linear.name}"] = Cut((), slice(start, stop), padding)
        return replace(self.added_once(linear), in_features=stop - start)

    def added_once(self, linear: Linear) -> Linear:
        """Keeps a linear whole whose products ranks sum, so that one of them adds the bias."""
        return replace(linear, bias=linear.bias and self.rank.is_first)

    def vector(self, name: str, *rows: slice) -> None:
        """Cuts a vector, or the rows of another tensor."""
        self.found[f"{self.prefix}{name}"] = Cut(rows)

    def norm(self, norm: Norm, part: slice, share: NormShare | None) -> Norm:
        """Cuts a norm. `share`: None where it is over channels of this rank alone."""
        self.vector(norm.tensor, part)
        return replace(norm, size=size(part), share=share)
