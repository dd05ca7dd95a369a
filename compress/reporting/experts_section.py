"""Experts of a mixture on the page of a run: how many calibration tokens each one saw."""

from __future__ import annotations

from compress.reporting.page import Paragraph, Section, Table
from compress.reporting.report_data import ExpertCoverage, RunReport

RAREST = 12

HEAD = ("mixture", "experts", "fewest tokens", "median", "most", "below the least", "unused", "tokens added")


def experts_section(report: RunReport) -> Section | None:
    """Lists the coverage of each mixture and the rarest experts; None without mixtures."""
    found = [each for block in report.blocks for each in block.experts]
    if not found:
        return None
    rare = sum(each.num_rare for each in found)
    least = ", ".join(f"{each:,}" for each in sorted({each.least for each in found}))
    note = (
        f"{rare} of {sum(len(each.tokens) for each in found)} experts saw fewer than {least} calibration tokens, two "
        "for each channel of their inputs. Their statistics also count other tokens of the same mixture, evenly spread "
        "over the calibration."
    )
    if not rare:
        note = f"Every expert saw at least {least} calibration tokens, two for each channel of its inputs."
    coverage = Table(HEAD, [_row(each) for each in found], range(1, len(HEAD)))
    return Section.of("Experts", Paragraph(note), coverage, _rarest(found))


def _row(each: ExpertCoverage) -> tuple[object, ...]:
    counts = sorted(each.tokens)
    return (
        each.module,
        len(counts),
        f"{counts[0]:,}",
        f"{counts[len(counts) // 2]:,}",
        f"{counts[-1]:,}",
        each.num_rare,
        counts.count(0),
        f"{sum(each.added):,}",
    )


def _rarest(found: list[ExpertCoverage]) -> Table:
    experts = [
        (f"{each.module}.{index}", tokens, added)
        for each in found
        for index, (tokens, added) in enumerate(zip(each.tokens, each.added, strict=True))
    ]
    rows = sorted(experts, key=lambda expert: expert[1])[:RAREST]
    return Table(("expert", "tokens", "added"), rows, (1, 2), f"The {len(rows)} experts with the fewest tokens")
