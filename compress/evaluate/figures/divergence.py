"""Figures of the quality check: divergence from the dense model, and perplexity."""

from __future__ import annotations

from collections.abc import Callable

from compress.evaluate.figures.base import FIGURES, Report, ReportFigure


def _measured(name: str) -> Callable[[Report], float | None]:
    return lambda report: report["quality"].get(name)


FIGURES.register("kl", order=0)(ReportFigure("mean KL to the dense model in nats", "at most", _measured("kl_mean")))
FIGURES.register("kl_p999", order=1)(ReportFigure("its 99.9 % quantile", "at most", _measured("kl_p999")))
FIGURES.register("flips", order=2)(ReportFigure("share of flipped first tokens", "at most", _measured("flips")))
FIGURES.register("acceptance", order=3)(ReportFigure("expected acceptance", "at least", _measured("acceptance")))
FIGURES.register("perplexity", order=4)(ReportFigure("perplexity", "at most", _measured("perplexity")))
