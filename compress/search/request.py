"""What a search is asked for, as data: `compress search` builds it from options, a recipe file from `search:`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import Scheme
from compress.recipe import CalibrationOptions, Recipe
from compress.search.form import Form
from compress.search.goal import Goal
from compress.search.menu import DEFAULT_MENU, parse_menu
from compress.search.units import EMBEDDING, Unit
from compress.stages.quantize import SMOOTHING_METHODS, QuantizeStage
from compress.stages.words import nearest

METHODS = ("gptq", "rtn")
DEFAULT_MEASURED = 8
DEFAULT_TRIES = 5


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Everything that decides what a search finds besides the model.

    Attributes:
        goal: what it aims at.
        menu: what a layer may become.
        method: how weights are rounded, both where sensitivities are measured and in the end.
        measured: sequences of the calibration text that sensitivities are measured on; rounding does not see them.
        tries: checkpoints that may be made before a target of KL is met as closely as it can be.
        ignore: patterns of modules that stay dense.
        ends: whether the token embedding and the output head take part. They are rounded and nothing else; only this
            runtime reads a rounded embedding.
    """

    goal: Goal
    menu: tuple[Form, ...] = field(default_factory=lambda: parse_menu(DEFAULT_MENU))
    method: str = "gptq"
    measured: int = DEFAULT_MEASURED
    tries: int = DEFAULT_TRIES
    ignore: tuple[str, ...] = ()
    ends: bool = False
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    seed: int = 0
    name: str = "search"

    def __post_init__(self) -> None:
        if self.method in SMOOTHING_METHODS:
            problem = f"{self.method} smooths several layers at once, so none has a sensitivity of its own"
            raise RecipeError(problem, "Search with gptq or rtn")
        if self.method not in METHODS:
            raise RecipeError(f"method {self.method!r} cannot be searched with", nearest(self.method, METHODS, "Use"))
        for name, value in (("measured", self.measured), ("tries", self.tries)):
            if value < 1:
                raise RecipeError(f"{name}={value} leaves nothing to go by", f"Use {name} 4 or more")
        for form in self.menu:
            self._check(form)

    def _check(self, form: Form) -> None:
        """Raises RecipeError for a form that looks at inputs where rounding does not: its run would have no text."""
        if self.method == "rtn" and any(stage.needs_calibration for stage in form.stages(self.method, ())):
            problem = f"{form} is found by inputs, and with rtn nothing looks at them"
            raise RecipeError(problem, "Search with gptq, or make factors by plain svd, e.g. svd0.8w8")

    def probe(self) -> Recipe:
        """A recipe that takes the same layers and texts: what a search is prepared with."""
        text = CalibrationOptions(
            self.calibration.source, self.calibration.samples + self.measured, self.calibration.length
        )
        return Recipe((QuantizeStage("gptq", Scheme(8, None), ignore=self.ignore),), text, self.seed, self.name)

    def method_of(self, unit: Unit) -> str:
        """How a unit is rounded. Rows of an embedding are looked up, not multiplied: nothing can make up for errors."""
        return "rtn" if unit.block == EMBEDDING else self.method

    def recipe(self, chosen: Mapping[Unit, Form]) -> Recipe:
        """The recipe that gives every unit its form: the stages of each form together, small ones first.

        Raises:
            RecipeError: all units stay dense.
        """
        targets: dict[tuple[str, Form], list[str]] = {}
        for unit, form in chosen.items():
            targets.setdefault((self.method_of(unit), form), []).extend(unit.modules)
        order = sorted(targets, key=lambda each: (_order(each[1]), each[0]))
        stages = [stage for each in order for stage in each[1].stages(each[0], targets[each])]
        if not stages:
            raise RecipeError(f"{self.goal} leaves every layer dense", "Ask for less, or leave dense out of --menu")
        return Recipe(tuple(stages), self.calibration, self.seed, self.name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the report."""
        return asdict(self) | {"menu": list(map(str, self.menu))}


def _order(form: Form) -> tuple[float, int, str]:
    """Few bits first, and of the same bits those with fewer scales."""
    group = form.scheme.group_size if form.scheme else None
    return form.bits_per_weight, -(group or 1 << 30), str(form)
