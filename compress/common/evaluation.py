"""Figures of a model on a text, and of its divergence from another. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of one pass over windows of text; those of a comparison are None without a baseline.

    Errors are standard errors over windows, because the tokens of one window depend on each other; None for a single
    window.

    Attributes:
        perplexity: exp of the mean negative log-likelihood (natural log) of the predicted tokens.
        kl_mean, kl_p999: mean and 99.9 % quantile over positions of KL(baseline || model), in nats.
        top1_agreement: share of positions where both rank the same token first.
        acceptance: mean over positions of the sum over tokens of min(p, q): the share of drafts of one model that
            speculative sampling of the other accepts.
        flips_standard_error: of `top1_agreement`, and of `flips`.
    """

    perplexity: float
    tokens: int
    baseline_perplexity: float | None = None
    kl_mean: float | None = None
    kl_p999: float | None = None
    kl_standard_error: float | None = None
    top1_agreement: float | None = None
    kl_p999_standard_error: float | None = None
    acceptance: float | None = None
    acceptance_standard_error: float | None = None
    flips_standard_error: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Reads the figures of a report, which may hold other entries. Raises TypeError: a figure is missing."""
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})

    @property
    def flips(self) -> float | None:
        """Share of positions where the two models rank different tokens first."""
        return None if self.top1_agreement is None else 1 - self.top1_agreement

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self) | {"flips": self.flips}

    def comparison(self) -> Iterator[tuple[str, str]]:
        """Yields names and values of the figures of a comparison, as every table, page and card shows them."""
        figures = (
            ("KL mean (nats)", self.kl_mean, self.kl_standard_error, _nats),
            ("KL 99.9 % (nats)", self.kl_p999, self.kl_p999_standard_error, _nats),
            ("acceptance", self.acceptance, self.acceptance_standard_error, _percent),
            ("first token flipped", self.flips, self.flips_standard_error, _percent),
        )
        for name, value, error, shown in figures:
            if value is not None:
                yield name, shown(value, error)


def _nats(value: float, error: float | None) -> str:
    return f"{value:.5f}" + ("" if error is None else f" ± {error:.5f}")


def _percent(value: float, error: float | None) -> str:
    return f"{100 * value:.2f}" + (" %" if error is None else f" ± {100 * error:.2f} %")


MEASURED_KEY = "figures"
"""Entry of reports with the measured figures by name."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Value of a figure.

    Attributes:
        value: None if the figure was not measured.
        text: what the figure was measured on, or the reason why it was not measured; one line.
        applies: whether the figure is defined for the model.
        details: plain values for the report.
    """

    value: float | None
    text: str = ""
    applies: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def nothing(cls, text: str) -> Finding:
        """Returns the finding of a figure that is not defined for the model."""
        return cls(None, text, applies=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.text if self.value is None else f"{self.value:.4g}: {self.text}"


def findings_of(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of the measured figures of a report, as every table and card shows them."""
    for name, values in (report.get(MEASURED_KEY) or {}).items():
        yield name, str(Finding(**values))
