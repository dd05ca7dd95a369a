"""The interface of figures that a gate may limit, and their registry. Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.common.errors import RecipeError
from compress.common.evaluation import MEASURED_KEY, Finding
from compress.common.registry import Registry

if TYPE_CHECKING:
    from compress.evaluate.side import Side

Report = Mapping[str, Any]


class Figure(ABC):
    """A figure of reports that may be limited.

    Attributes:
        word: how the limit is kept, of `compress.common.cli.LIMITS`.
        usual: limit that `--gate default` sets; None for a figure whose limit depends on the size.
    """

    help: str
    word: str
    usual: float | None = None

    @abstractmethod
    def read(self, name: str, report: Report) -> Finding:
        """Takes the figure `name` from a report."""


@dataclass(frozen=True, slots=True)
class ReportFigure(Figure):
    """A figure that every report has, so that it costs nothing.

    Attributes:
        take: takes it from a report; None where it was not measured.
    """

    help: str
    word: str
    take: Callable[[Report], float | None]
    usual: float | None = None

    def read(self, name: str, report: Report) -> Finding:
        return Finding(self.take(report))


class MeasuredFigure(Figure):
    """A figure that compares a packed model with its dense one, measured only where a gate asks for it.

    One model is in memory at a time: each is observed, and the observations are compared.
    """

    def read(self, name: str, report: Report) -> Finding:
        found = report.get(MEASURED_KEY, {}).get(name)
        return Finding(None) if found is None else Finding(**found)

    @abstractmethod
    def observe(self, side: Side) -> Any:
        """Returns what `judge` compares, in little memory. Raises ToolkitError: the model cannot be observed."""

    @abstractmethod
    def judge(self, dense: Any, packed: Any) -> Finding:
        """Compares the observations of both models."""


FIGURES: Registry[Figure] = Registry("limit of a gate", "compress.evaluate.figures", error=RecipeError)
