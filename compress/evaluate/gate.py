"""Limits that a compressed model must keep, checked against the report of its run. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compress.common.cli import LIMITS
from compress.common.errors import RecipeError
from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure, Report

DEFAULT = "default"
"""Word for the usual limits of all figures that have one."""


def describe_gate() -> str:
    """Returns the help of the option."""
    known = ", ".join(f"{name} ({figure.word}; {figure.help})" for name, figure in FIGURES.items())
    return (
        f"Limits of the result, of which any that is not kept makes the exit status 1: {known}. "
        f"`{DEFAULT}` stands for {' '.join(f'{name}={limit:g}' for name, limit in usual_limits().items())}."
    )


def usual_limits() -> dict[str, float]:
    """Returns the limits that `default` stands for."""
    return {name: figure.usual for name, figure in FIGURES.items() if figure.usual is not None}


def parse_gate(written: str | Mapping[str, float]) -> dict[str, float]:
    """Reads limits by name, or a text such as `kl=0.05 flips=0.1` or `default kl=0.05`. Raises RecipeError: an unknown
    name, or no number."""
    if isinstance(written, str):
        words = written.replace(",", " ").split()
        pairs = (each.partition("=")[::2] for each in words if each != DEFAULT)
        given = {name: _number(name, value) for name, value in pairs}
        written = (usual_limits() if DEFAULT in words else {}) | given
    for name in written:
        FIGURES.find(name)
    return dict(written)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise RecipeError(f"{name}={value} is not a limit", "Write --gate 'kl=0.05 flips=0.1'") from error


def measured_for(limits: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the names of the limited figures that are measured only on request."""
    return tuple(name for name in limits if isinstance(FIGURES.find(name), MeasuredFigure))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit and what was found."""

    name: str
    limit: float
    found: Finding

    @property
    def is_kept(self) -> bool:
        """Whether the limit is kept: by a value, or because the figure says nothing about this model."""
        if self.found.value is None:
            return not self.found.applies
        return LIMITS[FIGURES[self.name].word](self.found.value, self.limit)

    def __str__(self) -> str:
        value = self.found.value
        was = "was not measured" if self.found.applies else "does not apply"
        found = was if value is None else f"is {value:.4g}"
        text = f" ({self.found.text})" if self.found.text else ""
        return f"{self.name} {found}{text}, {FIGURES[self.name].word} {self.limit:g}"


def verdicts(limits: Mapping[str, float], report: Report) -> Iterator[Verdict]:
    """Yields the verdict on each limit, in the order of the figures."""
    for name, figure in FIGURES.items():
        if name in limits:
            yield Verdict(name, limits[name], figure.read(name, report))
