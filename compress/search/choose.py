"""From sensitivities to a recipe: the form of every unit for a budget or a limit. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError
from compress.search.allocate import Allocation, Frontier, Option
from compress.search.form import Form
from compress.search.units import Unit


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
