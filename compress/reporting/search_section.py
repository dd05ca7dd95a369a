"""What a search found, as a section of the page."""

from __future__ import annotations

from compress.reporting.axis import Axis, short
from compress.reporting.html import paragraph, section, table, tag, text
from compress.reporting.run_report import RunReport
from compress.reporting.search_record import SearchedUnit, SearchRecord
from compress.reporting.svg import BOTTOM, MUTED, TOP, Bar, Mark, Series, bars, figure, lines
from compress.reporting.units import size


def search_section(report: RunReport) -> str:
    """Sensitivities over depth, what they add up to, and the choice of every layer; nothing where none was searched."""
    search = report.search
    if search is None:
        return ""
    charts = [each for each in (sensitivity_chart(report, search), sums_chart(report, search)) if each]
    note = (
        f"Target: {search.target}. Sensitivities were measured on {search.measured_tokens:,} tokens of calibration "
        "text that no method saw."
    )
    listed = tag("details", tag("summary", text(f"The {len(search.units)} choices")), _choices(search))
    return section("Search", paragraph(note), tag("div", *charts, class_="charts"), _tries(search), listed)


def sensitivity_chart(report: RunReport, search: SearchRecord) -> str:
    """KL of each unit alone over depth, a line for each kind; nothing where no unit stands in a block."""
    scheme = search.typical
    marks: dict[str, list[Mark]] = {}
    for unit in search.units:
        place = _place(report, unit)
        if place is not None and scheme in unit.sensitivity:
            index, kind = place
            value = unit.sensitivity[scheme]
            title = f"{kind}, block {index}: KL {short(value)} as {scheme}; chosen: {unit.chosen}"
            marks.setdefault(kind, []).append(Mark(index, value, title))
    series = [Series(kind, tuple(found)) for kind, found in marks.items()]
    if not series:
        return ""
    up = Axis.spanning([mark.y for each in series for mark in each.marks], BOTTOM, TOP)
    scale = "; logarithmic scale" if up.is_log else ""
    return figure(
        "Sensitivity of layers",
        f"KL of the whole model when only these layers are {scheme}, in nats{scale}",
        lines(f"Sensitivity of layers as {scheme}", series, len(report.blocks), up),
        list(enumerate(each.name for each in series)),
    )


def sums_chart(report: RunReport, search: SearchRecord) -> str:
    """What sensitivities add up to for one scheme everywhere, and for the choice; and what that measured."""
    rows = [Bar(f"{scheme} everywhere", f"{total:.4f}", ((total, MUTED),)) for scheme, total in search.uniform.items()]
    rows.append(Bar("chosen, predicted", f"{search.predicted:.4f}", ((search.predicted, 0),)))
    measured = report.quality.kl_mean if report.quality else None
    if measured is not None:
        rows.append(Bar("chosen, measured", f"{measured:.4f}", ((measured, 1),)))
    rows.sort(key=lambda row: -row.parts[0][0])
    subtitle = "sums of sensitivities, in nats; measured: the finished checkpoint on the evaluation text"
    return figure("What changes add up to", subtitle, bars("Sums of sensitivities", rows))


def _choices(search: SearchRecord) -> str:
    schemes = list(dict.fromkeys(scheme for unit in search.units for scheme in unit.sensitivity))
    rows = [
        (
            ", ".join((unit.modules[0], *(module.rpartition(".")[2] for module in unit.modules[1:]))),
            unit.chosen,
            *(short(unit.sensitivity[scheme]) if scheme in unit.sensitivity else "-" for scheme in schemes),
        )
        for unit in search.units
    ]
    return table(("layers", "chosen", *(f"KL as {each}" for each in schemes)), rows, tuple(range(2, 2 + len(schemes))))


def _tries(search: SearchRecord) -> str:
    if not search.tries:
        return ""
    rows = [
        (number, f"{each.predicted:.4f}", f"{each.measured:.4f}", size(each.bytes))
        for number, each in enumerate(search.tries, 1)
    ]
    return table(("try", "predicted KL", "measured KL", "size"), rows, (0, 1, 2, 3))


def _place(report: RunReport, unit: SearchedUnit) -> tuple[int, str] | None:
    """Index of the block and the last parts of the names; None for what stands in no block."""
    for index, block in enumerate(report.blocks):
        if unit.modules[0].startswith(f"{block.name}."):
            return index, ", ".join(module.rpartition(".")[2] for module in unit.modules)
    return None
