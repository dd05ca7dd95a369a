"""Limits that a compressed model must keep, checked against the report of its run. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compress.common.cli import LIMITS
from compress.common.errors import RecipeError
from compress.common.registry import Registry

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of reports that may be limited.

    Attributes:
        word: how the limit is kept, of `LIMITS`.
        read: takes it from a report; None where it was not measured.
    """

    help: str
    word: str
    read: Callable[[Report], float | None]


FIGURES: Registry[Figure] = Registry("limit of a gate", error=RecipeError)


def _measured(name: str) -> Callable[[Report], float | None]:
    return lambda report: report["quality"].get(name)


def _calibrated_experts(report: Report) -> float | None:
    """Returns the share of experts that the router sent calibration tokens to; 1 without experts."""
    if not report.get("calibration"):
        return None
    counts = [tokens for block in report["blocks"] for each in block.get("experts", ()) for tokens in each["tokens"]]
    return sum(count > 0 for count in counts) / len(counts) if counts else 1.0


FIGURES.register("kl", order=0)(Figure("mean KL to the dense model in nats", "at most", _measured("kl_mean")))
FIGURES.register("kl_p999", order=1)(Figure("its 99.9 % quantile", "at most", _measured("kl_p999")))
FIGURES.register("flips", order=2)(Figure("share of flipped first tokens", "at most", _measured("flips")))
FIGURES.register("acceptance", order=3)(Figure("expected acceptance", "at least", _measured("acceptance")))
FIGURES.register("perplexity", order=4)(Figure("perplexity", "at most", _measured("perplexity")))
FIGURES.register("experts", order=5)(Figure("share of calibrated experts", "at least", _calibrated_experts))


def describe_gate() -> str:
    """Returns the help of the option."""
    known = ", ".join(f"{name} ({figure.word}; {figure.help})" for name, figure in FIGURES.items())
    return f"Limits of the result, of which any that is not kept makes the exit status 1: {known}."


def parse_gate(text: str) -> dict[str, float]:
    """Reads `kl=0.05 flips=0.1`. Raises RecipeError: an unknown name, or no number."""
    pairs = (each.partition("=")[::2] for each in text.replace(",", " ").split())
    return check_gate({name: _number(name, value) for name, value in pairs})


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise RecipeError(f"{name}={value} is not a limit", "Write --gate 'kl=0.05 flips=0.1'") from error


def check_gate(limits: Mapping[str, float]) -> dict[str, float]:
    """Returns limits with known names. Raises RecipeError for others."""
    for name in limits:
        FIGURES.find(name)
    return dict(limits)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit and what was found."""

    name: str
    limit: float
    found: float | None

    @property
    def is_kept(self) -> bool:
        return self.found is not None and LIMITS[FIGURES[self.name].word](self.found, self.limit)

    def __str__(self) -> str:
        found = "was not measured" if self.found is None else f"is {self.found:.4g}"
        return f"{self.name} {found}, {FIGURES[self.name].word} {self.limit:g}"


def verdicts(limits: Mapping[str, float], report: Report) -> Iterator[Verdict]:
    """Yields the verdict on each limit, in the order of the figures."""
    for name, figure in FIGURES.items():
        if name in limits:
            yield Verdict(name, limits[name], figure.read(report))
