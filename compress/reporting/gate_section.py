"""Figures that a gate asked for on the page of a run."""

from __future__ import annotations

from compress.reporting.page import Section, Table, maybe
from compress.reporting.report_data import RunReport


def gate_section(report: RunReport) -> Section | None:
    """Lists each measured figure with what it was found on, and shares by layer where it has them; None without any."""
    if not report.figures:
        return None
    rows = [(name, maybe(found.value), found.text) for name, found in report.figures.items()]
    by_layer = [
        (name, layer, maybe(value))
        for name, found in report.figures.items()
        for layer, value in found.details.get("layers", {}).items()
    ]
    layers = Table(("figure", "layer", "value"), by_layer, (2,)) if by_layer else None
    return Section.of("Gate", Table(("figure", "value", "found"), rows, (1,)), layers)
