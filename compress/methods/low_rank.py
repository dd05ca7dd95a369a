"""Low-rank factorization: plain SVD, ASVD and SVD-LLM, and the allocation of ranks to layers.

Two factors `[O, r]` and `[r, I]` hold `r * (O + I)` weights instead of `O * I`. The methods differ in the matrix that
whitens the weight before it is decomposed; `shared.decomposition` has the algorithms and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.weights import Scheme
from compress.methods.base import FactorizationMethod, Needs, register

if TYPE_CHECKING:
    from calibration.statistics import InputStatistics
    from compress.methods.shared.decomposition import Whitening


@register
class SVD(FactorizationMethod):
    """Truncated singular value decomposition of the weight itself."""

    name: ClassVar[str] = "svd"
    help: ClassVar[str] = "truncated SVD, without calibration"
    is_fallback: ClassVar[bool] = True

    def whitening(self, statistics: InputStatistics) -> Whitening:
        from compress.methods.shared.decomposition import Whitening

        return Whitening()


@register
class ASVD(FactorizationMethod):
    """SVD of the weight, with inputs scaled by their mean magnitudes."""

    name: ClassVar[str] = "asvd"
    order: ClassVar[int] = 1
    help: ClassVar[str] = "inputs scaled by their magnitudes"
    data: ClassVar[Needs] = Needs(inputs=True)

    def whitening(self, statistics: InputStatistics) -> Whitening:
        from compress.methods.shared.decomposition import scale_inputs

        return scale_inputs(statistics.abs_mean)


@register
class SVDLLM(FactorizationMethod):
    """SVD of the weight whitened by the second moments of its inputs."""

    name: ClassVar[str] = "svd-llm"
    order: ClassVar[int] = 2
    help: ClassVar[str] = "whitened by the inputs, for the least output error"
    is_default: ClassVar[bool] = True
    energies_are_errors: ClassVar[bool] = True
    data: ClassVar[Needs] = Needs(inputs=True, hessian=True)

    def whitening(self, statistics: InputStatistics) -> Whitening:
        from compress.methods.shared.decomposition import whiten

        # The Hessian is twice the second moment.
        return whiten(statistics.hessian / 2)


ALIGNMENT = 8
"""Ranks are multiples of this number: rows of factors then fill whole words and matrix tiles."""
WORD_BITS = 32


def rank_step(scheme: Scheme | None) -> int:
    """Returns the divisor of ranks for a scheme of the factors, which needs whole groups and words; None is
    unquantized."""
    if scheme is None:
        return ALIGNMENT
    return math.lcm(ALIGNMENT, scheme.group_size or 1, WORD_BITS // math.gcd(int(scheme.bits), WORD_BITS))


def largest_rank(rows: int, columns: int, step: int) -> int:
    """Returns the largest multiple of `step` whose factors are smaller than the weight, or 0."""
    return (rows * columns - 1) // (rows + columns) // step * step


def uniform_rank(rows: int, columns: int, keep: float, step: int) -> int:
    """Returns the largest multiple of `step` whose factors hold at most a share `keep` of the weights, but at least
    `step`; 0 if even that would not be smaller than the weight."""
    wanted = int(keep * rows * columns / (rows + columns)) // step * step
    return min(max(wanted, step), largest_rank(rows, columns, step))


@dataclass(frozen=True, slots=True)
class RankedLinear:
    """Linear in a rank allocation.

    Attributes:
        step: divisor of its rank.
        energies: output energy of each rank, the squared singular values, descending.
    """

    rows: int
    columns: int
    step: int
    energies: Sequence[float]

    @property
    def weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class _Portion:
    """Increment of an allocation: energy gained for weights spent. It raises the linear's rank to `rank`; None keeps it
    dense."""

    name: str
    rank: int | None
    energy: float
    cost: int

    @property
    def value(self) -> float:
        return self.energy / self.cost


def share_out(linears: Mapping[str, RankedLinear], keep: float) -> dict[str, int | None]:
    """Allocates ranks with the least lost energy, given that all linears together hold at most a share `keep` of their
    weights.

    Singular values are descending, so it is optimal to add the portion with the most energy per weight next
    (water-filling). A linear whose factors would not be smaller stays dense: None. Every other one gets at least one
    step, even if that exceeds the budget.
    """
    left = keep * sum(linear.weights for linear in linears.values())
    ranks: dict[str, int | None] = {}
    offers: list[_Portion] = []
    for name, linear in linears.items():
        first, *others = _portions(name, linear)
        ranks[name] = first.rank
        left -= first.cost
        offers += others
    closed: set[str] = set()
    # A stable sort preserves the order of a linear's portions, because their values are descending.
    for portion in sorted(offers, key=lambda offer: -offer.value):
        if portion.name in closed:
            continue
        if portion.cost > left:
            closed.add(portion.name)
            continue
        left -= portion.cost
        ranks[portion.name] = portion.rank
    return _spend(linears, ranks, left)


def _spend(linears: Mapping[str, RankedLinear], ranks: dict[str, int | None], left: float) -> dict[str, int | None]:
    """Spends the rest of the budget on single steps, if a dense weight had the higher value but did not fit."""
    steps = [
        portion
        for name, rank in ranks.items()
        if rank is not None
        for portion in _steps(name, linears[name])
        if portion.rank is not None and portion.rank > rank
    ]
    for portion in sorted(steps, key=lambda step: -step.value):
        if portion.cost <= left:
            left -= portion.cost
            ranks[portion.name] = portion.rank
    return ranks


def share_out_over_blocks(blocks: Sequence[Mapping[str, RankedLinear]], keep: float) -> dict[str, int | None]:
    """Allocates the ranks of all blocks' linears within one budget, see `share_out`.

    Losses at different depths are not comparable, because outputs have different magnitudes. The loss of a block is
    therefore measured relative to its loss under a budget of its own: ranks move between blocks if the relative gain
    exceeds the relative loss.
    """
    units = [_lost_alone(linears, keep) for linears in blocks]
    together = {
        name: replace(linear, energies=[energy / unit for energy in linear.energies])
        for linears, unit in zip(blocks, units, strict=True)
        for name, linear in linears.items()
    }
    return share_out(together, keep)


def _lost_alone(linears: Mapping[str, RankedLinear], keep: float) -> float:
    """Returns the energy that a block loses under its own budget; 1 if it loses nothing."""
    ranks = share_out(linears, keep)
    dropped = (linears[name].energies[rank:] for name, rank in ranks.items() if rank is not None)
    return sum(map(sum, dropped)) or 1.0


def _steps(name: str, linear: RankedLinear) -> list[_Portion]:
    """Returns one portion per step of the rank, in descending value."""
    cost = linear.step * (linear.rows + linear.columns)
    most = largest_rank(linear.rows, linear.columns, linear.step)
    return [
        _Portion(name, rank, sum(linear.energies[rank - linear.step : rank]), cost)
        for rank in range(linear.step, most + 1, linear.step)
    ]


def _portions(name: str, linear: RankedLinear) -> list[_Portion]:
    """Returns one portion per step of the rank and one for the rest of the weight, in descending value after the
    first."""
    portions = _steps(name, linear)
    most = largest_rank(linear.rows, linear.columns, linear.step)
    spent = sum(portion.cost for portion in portions)
    portions.append(_Portion(name, None, sum(linear.energies[most:]), linear.weights - spent))
    # Keeping the weight dense can have a higher value than the last ranks. It is then merged with preceding ranks,
    # which keeps values descending.
    while len(portions) > 2 and portions[-1].value > portions[-2].value:
        last, before = portions.pop(), portions.pop()
        portions.append(_Portion(name, None, last.energy + before.energy, last.cost + before.cost))
    return portions
