"""Figures of the calibration of experts."""

from __future__ import annotations

from compress.evaluate.figures.base import FIGURES, Report, ReportFigure


def _tokens(report: Report) -> list[int] | None:
    """Returns the calibration tokens that the router sent to each expert; None without calibration."""
    if not report.get("calibration"):
        return None
    return [tokens for block in report["blocks"] for each in block.get("experts", ()) for tokens in each["tokens"]]


def _calibrated(report: Report) -> float | None:
    """Returns the share of experts with calibration tokens; 1 without experts."""
    counts = _tokens(report)
    if counts is None:
        return None
    return sum(count > 0 for count in counts) / len(counts) if counts else 1.0


def _unused(report: Report) -> float | None:
    """Returns the number of experts without calibration tokens."""
    counts = _tokens(report)
    return None if counts is None else float(counts.count(0))


FIGURES.register("experts", order=5)(ReportFigure("share of calibrated experts", "at least", _calibrated))
FIGURES.register("unused_experts", order=6)(
    ReportFigure("number of experts that saw no calibration token", "at most", _unused)
)
