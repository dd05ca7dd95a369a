"""The sections of a page that say how a checkpoint came to be, what went otherwise, and that it is sound."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compress.reporting.html import bullets, facts, paragraph, section, table, tag, text
from compress.reporting.run_report import RunReport
from compress.reporting.units import size


def exceptions(report: RunReport) -> str:
    """Fallbacks, notes, and what was kept dense and why."""
    fallbacks = [(linear.module, linear.recovery) for linear in report.linears if linear.recovery]
    dense = [(kind.tensor, kind.count, size(kind.bytes_after), kind.reason) for kind in report.kinds if kind.reason]
    parts = [table(("layer", "fallback"), fallbacks) if fallbacks else paragraph("No fallback was needed.")]
    parts.append(bullets(report.notes) if report.notes else "")
    parts.append(table(("kept dense", "count", "size", "why"), dense, (1, 2)) if dense else "")
    return section("Exceptions and notes", *parts)


def verification(report: RunReport) -> str:
    """What re-reading the finished checkpoint found."""
    found = report.verification
    verdict = tag("span", text("sound" if found.ok else "not sound"), class_="good" if found.ok else "bad")
    schemes: dict[str, int] = {}
    for scheme in found.schemes.values():
        schemes[scheme] = schemes.get(scheme, 0) + 1
    rows = [
        ("format", found.format),
        ("compared bit for bit", f"{found.bit_compared} layers, with the codes chosen"),
        ("packed layers", ", ".join(f"{count} as {name}" for name, count in sorted(schemes.items())) or "none"),
        ("parameters", f"{found.num_parameters:,}, of which {found.num_packed:,} are packed"),
    ]
    said = f"Re-read from the disk when it was finished. To check it again: compress verify {report.folder}"
    return section(
        "Verification",
        tag("p", verdict),
        facts(rows),
        bullets([*found.problems, *found.notes]) if found.problems or found.notes else "",
        paragraph(said, class_="soft"),
    )


def made(report: RunReport) -> str:
    """Source, seed, tool, calibration, environment and the recipe."""
    rows: list[tuple[str, object]] = [
        ("source", report.source),
        ("seed", report.seed),
        ("tool", report.tool),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [("calibration", _calibration(report.calibration))]
    rows += [(str(key), value) for key, value in report.environment.items()]
    recipe = json.dumps(report.recipe, indent=2, ensure_ascii=False)
    shown = tag("details", tag("summary", "Recipe"), tag("pre", text(recipe)))
    warnings = report.calibration.get("warnings")
    listed = bullets(f"calibration: {line}" for line in warnings) if isinstance(warnings, list) and warnings else ""
    return section("How it was made", facts(rows), listed, shown)


def _calibration(fields: Mapping[str, Any]) -> str:
    if not fields:
        return "none: the method needs no data"
    amount = f"{fields.get('sequences', '?')} sequences of {fields.get('length', '?')} tokens"
    digest = str(fields.get("token_sha256", ""))[:12]
    return f"{fields.get('source', '?')}: {amount}; {fields.get('description', '')}; token sha256 {digest}"
