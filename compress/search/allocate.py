"""Which option each unit gets, so that losses add up to the least within a budget: a multiple-choice knapsack.

Free of torch. Solved by dynamic programming over the budget, which gives the best choice for every budget at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compress.common.errors import RecipeError
from compress.search.space import Form, Unit

STEPS = 1 << 16
"""Budgets that are told apart at most. Where costs have a common divisor large enough, the answer is exact; elsewhere
costs are rounded up to whole steps, and what that leaves over is spent greedily."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a unit could get: what it costs, in bytes, and what it loses, in nats."""

    cost: int
    loss: float


Menu = Sequence[Option]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The option of each unit by index, and what they cost and lose together."""

    chosen: tuple[int, ...]
    cost: int
    loss: float


class Frontier:
    """The best allocations of all budgets.

    Args:
        menus: options of each unit, one of which it gets; at least one each.
        steps: budgets told apart at most.
    """

    def __init__(self, menus: Sequence[Menu], steps: int = STEPS) -> None:
        self._menus = menus
        self._floors = [min(option.cost for option in menu) for menu in menus]
        self._step = _step(menus, steps)
        extras = [[self._extra(unit, option) for option in menu] for unit, menu in enumerate(menus)]
        self._extras = extras
        self._size = 1 + sum(map(max, extras))
        self._choices: list[np.ndarray] = []
        self._least = np.zeros(self._size)
        for menu, extra in zip(menus, extras, strict=True):
            self._add(menu, extra)

    @property
    def smallest(self) -> int:
        """The least that all units cost together."""
        return sum(self._floors)

    @property
    def least_loss(self) -> float:
        """What they lose where no budget limits them."""
        return float(self._least[-1])

    def within_cost(self, budget: int) -> Allocation | None:
        """The least loss of all allocations that cost at most `budget`; None where even the smallest costs more."""
        if budget < self.smallest:
            return None
        index = min((budget - self.smallest) // self._step, self._size - 1)
        return _filled(self._menus, self._at(index), budget)

    def within_loss(self, limit: float) -> Allocation:
        """The least cost of all allocations that lose at most `limit`, which must be `least_loss` or more."""
        return self._at(int(np.argmax(self._least <= limit)))

    def _extra(self, unit: int, option: Option) -> int:
        """Steps by which an option costs more than the unit's cheapest, rounded up."""
        return -((self._floors[unit] - option.cost) // self._step)

    def _add(self, menu: Menu, extra: Sequence[int]) -> None:
        """One more unit: for each budget the option that, with the best of what is left, loses least."""
        best = np.full(self._size, np.inf)
        choice = np.zeros(self._size, dtype=np.uint8)
        for index, (option, cost) in enumerate(zip(menu, extra, strict=True)):
            total = self._least[: self._size - cost] + option.loss
            better = total < best[cost:]
            best[cost:][better] = total[better]
            choice[cost:][better] = index
        self._least = best
        self._choices.append(choice)

    def _at(self, index: int) -> Allocation:
        chosen = []
        for choice, extra in zip(reversed(self._choices), reversed(self._extras), strict=True):
            chosen.append(int(choice[index]))
            index -= extra[chosen[-1]]
        return _allocation(self._menus, tuple(reversed(chosen)))


def _step(menus: Sequence[Menu], steps: int) -> int:
    """Bytes of a step: what divides all differences of costs, or more where that would be too many steps."""
    floors = [min(option.cost for option in menu) for menu in menus]
    exact = math.gcd(*(option.cost - floor for menu, floor in zip(menus, floors, strict=True) for option in menu)) or 1
    whole = sum(max(option.cost for option in menu) for menu in menus) - sum(floors)
    return max(exact, math.ceil(whole / steps))


def _allocation(menus: Sequence[Menu], chosen: tuple[int, ...]) -> Allocation:
    options = [menu[index] for menu, index in zip(menus, chosen, strict=True)]
    return Allocation(chosen, sum(option.cost for option in options), math.fsum(option.loss for option in options))


def _filled(menus: Sequence[Menu], allocation: Allocation, budget: int) -> Allocation:
    """Spends what is left of a budget on the changes that take away the most loss per byte."""
    while True:
        left = budget - allocation.cost
        offers = [
            (_worth(menu[now], option), unit, index)
            for unit, (menu, now) in enumerate(zip(menus, allocation.chosen, strict=True))
            for index, option in enumerate(menu)
            if option.loss < menu[now].loss and option.cost - menu[now].cost <= left
        ]
        if not offers:
            return allocation
        _, unit, index = max(offers)
        chosen = (*allocation.chosen[:unit], index, *allocation.chosen[unit + 1 :])
        allocation = _allocation(menus, chosen)


def _worth(now: Option, other: Option) -> float:
    """Loss taken away per byte."""
    more = other.cost - now.cost
    return (now.loss - other.loss) / more if more > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """The form of every unit, the bytes they take together, and the sum of their sensitivities."""

    forms: dict[Unit, Form]
    cost: int
    predicted: float


class Chooser:
    """All best choices of a search.

    Args:
        menus: forms that each unit may get.
        cost: bytes of a unit in a form.
        loss: its sensitivity.
    """

    def __init__(
        self,
        menus: Mapping[Unit, Sequence[Form]],
        cost: Callable[[Unit, Form], int],
        loss: Callable[[Unit, Form], float],
    ) -> None:
        self._menus = menus
        self._frontier = Frontier(
            [[Option(cost(unit, form), loss(unit, form)) for form in menu] for unit, menu in menus.items()]
        )

    def within_budget(self, budget: int) -> Choice:
        """The least sum of sensitivities. Raises RecipeError where even the smallest forms take more bytes."""
        found = self._frontier.within_cost(budget)
        if found is None:
            raise RecipeError(
                f"the layers take {self._frontier.smallest:,} bytes at least, not {budget:,}", "Allow more"
            )
        return self._choice(found)

    def within_loss(self, limit: float) -> Choice:
        """The fewest bytes; where even the best forms lose more, those."""
        return self._choice(self._frontier.within_loss(max(limit, self._frontier.least_loss)))

    def _choice(self, allocation: Allocation) -> Choice:
        chosen = zip(self._menus.items(), allocation.chosen, strict=True)
        return Choice({unit: menu[index] for (unit, menu), index in chosen}, allocation.cost, allocation.loss)


CLOSE = 0.97
"""A checkpoint whose divergence is at least this share of what is allowed is close enough."""


@dataclass(frozen=True, slots=True)
class Try:
    """One checkpoint that was made.

    Attributes:
        predicted: sum of the sensitivities of its layers, in nats.
        measured: its mean divergence, in nats.
        bytes: of its weight files.
    """

    predicted: float
    measured: float
    bytes: int


def best(tries: Sequence[Try], limit: float) -> Try | None:
    """The smallest that keeps the limit; None when none does."""
    return min((each for each in tries if each.measured <= limit), key=lambda each: each.bytes, default=None)


def next_allowed(tries: Sequence[Try], limit: float) -> float | None:
    """The sum of sensitivities to allow next; None when the best is close enough.

    Measured divergence grows with the predicted one, nearly in proportion: so the last ratio tells what to allow.
    What is known to be too much, or not too much, bounds it.
    """
    if not tries:
        return limit
    kept = max((each for each in tries if each.measured <= limit), key=lambda each: each.predicted, default=None)
    if kept and kept.measured >= CLOSE * limit:
        return None
    low = kept.predicted if kept else 0.0
    high = min((each.predicted for each in tries if each.measured > limit), default=math.inf)
    last = tries[-1]
    aim = last.predicted * limit / last.measured * (1 + CLOSE) / 2 if last.measured > 0 else math.inf
    if low < aim < high:
        return aim
    if math.isinf(high):
        return 2 * low
    return math.sqrt(low * high) if low else high / 2
