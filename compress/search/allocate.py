"""Allocation: one candidate for each layer group with the least sum of losses within a budget.

Multiple-choice knapsack, solved by dynamic programming over the budget, which yields the best choice for every budget
at once. Measured sensitivities are stored in a file. Does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compress.common.errors import CheckpointError, RecipeError
from compress.common.files import atomic_file, read_json
from compress.search.space import Candidate, LayerGroup

STEPS = 1 << 16
"""Largest number of budgets. The result is exact if costs have a large enough common divisor; otherwise costs are
rounded up to whole steps, and the remainder is spent greedily."""


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a layer group: its cost in bytes and its loss in nats."""

    cost: int
    loss: float


Menu = Sequence[Option]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Index of each group's option, and the sums of costs and losses."""

    chosen: tuple[int, ...]
    cost: int
    loss: float


class Frontier:
    """Best allocations of all budgets."""

    def __init__(self, menus: Sequence[Menu], steps: int = STEPS) -> None:
        self._menus = menus
        self._floors = [min(option.cost for option in menu) for menu in menus]
        self._step = _step(menus, steps)
        floors = zip(self._floors, menus, strict=True)
        # Costs over the group's cheapest option, in steps, rounded up.
        extras = [[-((least - each.cost) // self._step) for each in menu] for least, menu in floors]
        self._extras = extras
        self._size = 1 + sum(map(max, extras))
        self._choices: list[np.ndarray] = []
        self._least = np.zeros(self._size)
        for menu, extra in zip(menus, extras, strict=True):
            self._add(menu, extra)

    @property
    def smallest(self) -> int:
        """Least sum of costs."""
        return sum(self._floors)

    @property
    def least_loss(self) -> float:
        """Least sum of losses, without a budget."""
        return float(self._least[-1])

    def within_cost(self, budget: int) -> Allocation | None:
        """Returns the allocation of least loss that costs at most `budget`; None if even the smallest costs more."""
        if budget < self.smallest:
            return None
        index = min((budget - self.smallest) // self._step, self._size - 1)
        return _filled(self._menus, self._at(index), budget)

    def within_loss(self, limit: float) -> Allocation:
        """Returns the cheapest allocation that loses at most `limit`, which must be `least_loss` or more."""
        return self._at(int(np.argmax(self._least <= limit)))

    def _add(self, menu: Menu, extra: Sequence[int]) -> None:
        """Adds a group: for each budget, the option with the least total loss."""
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
    """Returns the bytes of a step: the common divisor of differences of costs, or more to limit the steps."""
    floors = [min(option.cost for option in menu) for menu in menus]
    exact = math.gcd(*(option.cost - floor for menu, floor in zip(menus, floors, strict=True) for option in menu)) or 1
    whole = sum(max(option.cost for option in menu) for menu in menus) - sum(floors)
    return max(exact, math.ceil(whole / steps))


def _allocation(menus: Sequence[Menu], chosen: tuple[int, ...]) -> Allocation:
    options = [menu[index] for menu, index in zip(menus, chosen, strict=True)]
    return Allocation(chosen, sum(option.cost for option in options), math.fsum(option.loss for option in options))


def _filled(menus: Sequence[Menu], allocation: Allocation, budget: int) -> Allocation:
    """Spends the remainder of a budget on the changes that reduce the loss most per byte."""
    while True:
        left = budget - allocation.cost
        offers = [
            (_worth(menu[now], option), group, index)
            for group, (menu, now) in enumerate(zip(menus, allocation.chosen, strict=True))
            for index, option in enumerate(menu)
            if option.loss < menu[now].loss and option.cost - menu[now].cost <= left
        ]
        if not offers:
            return allocation
        _, group, index = max(offers)
        chosen = (*allocation.chosen[:group], index, *allocation.chosen[group + 1 :])
        allocation = _allocation(menus, chosen)


def _worth(now: Option, other: Option) -> float:
    """Returns the reduction of the loss per byte."""
    more = other.cost - now.cost
    return (now.loss - other.loss) / more if more > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate for each layer group, their bytes, and the sum of their sensitivities."""

    candidates: dict[LayerGroup, Candidate]
    cost: int
    predicted: float


class Chooser:
    """Best choices of a search."""

    def __init__(
        self,
        candidates: Mapping[LayerGroup, Sequence[Candidate]],
        cost: Callable[[LayerGroup, Candidate], int],
        loss: Callable[[LayerGroup, Candidate], float],
    ) -> None:
        self._candidates = candidates
        self._frontier = Frontier(
            [
                [Option(cost(group, candidate), loss(group, candidate)) for candidate in offered]
                for group, offered in candidates.items()
            ]
        )

    def within_budget(self, budget: int) -> Choice:
        """Returns the choice with the least sum of sensitivities. Raises RecipeError if nothing fits."""
        found = self._frontier.within_cost(budget)
        if found is None:
            raise RecipeError(
                f"the layers take {self._frontier.smallest:,} bytes at least, not {budget:,}", "Allow more"
            )
        return self._choice(found)

    def within_loss(self, limit: float) -> Choice:
        """Returns the smallest choice that loses at most `limit`; the best one if all lose more."""
        return self._choice(self._frontier.within_loss(max(limit, self._frontier.least_loss)))

    def _choice(self, allocation: Allocation) -> Choice:
        chosen = zip(self._candidates.items(), allocation.chosen, strict=True)
        return Choice({group: offered[index] for (group, offered), index in chosen}, allocation.cost, allocation.loss)


CLOSE = 0.97
"""Minimum share of the KL target that counts as close enough."""


@dataclass(frozen=True, slots=True)
class Try:
    """Checkpoint created while approaching a KL target.

    Attributes:
        predicted: sum of the sensitivities of its layers, in nats.
        measured: its mean divergence, in nats.
        bytes: of its weight files.
    """

    predicted: float
    measured: float
    bytes: int


def best(tries: Sequence[Try], limit: float) -> Try | None:
    """Returns the smallest checkpoint within the limit, or None."""
    return min((each for each in tries if each.measured <= limit), key=lambda each: each.bytes, default=None)


def next_kl_target(tries: Sequence[Try], limit: float) -> float | None:
    """Returns the sum of sensitivities to aim at next (secant method); None if the best try is close enough.

    Measured divergence is nearly proportional to the predicted one, so the last ratio gives the next target, within the
    bounds of earlier tries.
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


FORMAT_VERSION = 1


@dataclass
class Sensitivities:
    """Divergence in nats caused by each layer group alone, by candidate.

    Independent of other candidates and of the target, so another search of the same model reuses them.

    Attributes:
        identity: everything that they depend on.
        values: by name of the group, then by candidate.
    """

    path: Path
    identity: dict[str, Any]
    values: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any], restart: bool = False) -> Sensitivities:
        """Opens the file of earlier searches, or creates one. Raises CheckpointError: the file is damaged, or belongs
        to another model, text or method."""
        now = dict(identity)
        if restart or not path.is_file():
            return cls(path, now)
        try:
            stored = read_json(path, "Remove it, or add --restart")
            version, before, values = stored["format_version"], stored["identity"], stored["values"]
            values = {name: {key: float(value) for key, value in each.items()} for name, each in values.items()}
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} holds no sensitivities: {error!r}", "Remove it, or add --restart") from error
        differing = [key for key in now | before if now.get(key) != before.get(key)]
        if version != FORMAT_VERSION or differing:
            what = ", ".join(sorted(differing)) or f"format_version {version}"
            raise CheckpointError(
                f"{path} holds sensitivities of another configuration ({what} differ)",
                "Name another file with --sensitivities, or add --restart to measure them again",
            )
        return cls(path, now, values)

    def get(self, group: LayerGroup, candidate: Candidate) -> float | None:
        return self.values.get(group.name, {}).get(str(candidate))

    def of(self, group: LayerGroup, candidate: Candidate) -> float:
        """Returns a stored value."""
        return self.values[group.name][str(candidate)]

    def add(self, group: LayerGroup, candidate: Candidate, divergence: float) -> None:
        """Stores one value, in memory and on disk."""
        self.values.setdefault(group.name, {})[str(candidate)] = divergence
        stored = {"format_version": FORMAT_VERSION, "identity": self.identity, "values": self.values}
        with atomic_file(self.path) as stream:
            stream.write(json.dumps(stored, indent=1).encode())
