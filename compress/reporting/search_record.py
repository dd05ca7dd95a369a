"""The `search` section of a report as data: how sensitive layers are, and what was chosen for that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from compress.reporting.fields import Fields


@dataclass(frozen=True, slots=True)
class SearchedUnit:
    """Layers that share one choice.

    Attributes:
        chosen: what they become: `w4g128`, `asvd0.8`.
        sensitivity: KL of the whole model, in nats, when only these layers are changed, by what they become.
    """

    modules: tuple[str, ...]
    chosen: str
    sensitivity: dict[str, float]


@dataclass(frozen=True, slots=True)
class SearchTry:
    """A checkpoint that was made on the way to a target of quality."""

    predicted: float
    measured: float
    bytes: int


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """A search.

    Attributes:
        target: what it aimed at, in words.
        measured_tokens: how much text sensitivities were measured on.
        predicted: sum of the sensitivities of what was chosen.
    """

    target: str
    measured_tokens: int
    predicted: float
    units: tuple[SearchedUnit, ...]
    tries: tuple[SearchTry, ...]

    @property
    def typical(self) -> str:
        """The scheme that most units could get and most did."""
        offered = Counter(scheme for unit in self.units for scheme in unit.sensitivity)
        chosen = Counter(unit.chosen for unit in self.units)
        return max(offered, key=lambda scheme: (offered[scheme], chosen[scheme], scheme))

    @property
    def uniform(self) -> dict[str, float]:
        """Sum of sensitivities by scheme, for the schemes that every unit could get, in the order of their loss."""
        shared = [scheme for scheme in self.units[0].sensitivity if all(scheme in u.sensitivity for u in self.units)]
        sums = {scheme: sum(unit.sensitivity[scheme] for unit in self.units) for scheme in shared}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def read_search(fields: Fields) -> SearchRecord:
    """Reads the section. Raises CheckpointError where it is damaged."""
    units = tuple(map(_unit, fields.children("units")))
    if not units:
        fields.refuse("units", "is empty")
    return SearchRecord(
        target=fields.text("target"),
        measured_tokens=fields.count("measured_tokens"),
        predicted=fields.number("predicted"),
        units=units,
        tries=tuple(
            SearchTry(each.number("predicted"), each.number("measured"), each.count("bytes"))
            for each in fields.children("tries")
        ),
    )


def _unit(fields: Fields) -> SearchedUnit:
    modules, measured = tuple(fields.texts("modules")), fields.child("sensitivity")
    sensitivity = {scheme: measured.number(scheme) for scheme in measured.values}
    if not modules or not sensitivity:
        fields.refuse("modules" if not modules else "sensitivity", "is empty")
    return SearchedUnit(modules, fields.text("chosen"), sensitivity)
