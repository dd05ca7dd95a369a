"""Checkpoints of one source side by side, and the Pareto frontier of size and quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from operator import attrgetter

from compress.checkpoint.kv_cache import EXACT
from compress.common.errors import ToolkitError
from compress.common.files import size
from compress.reporting.figures import Mark, Scatter
from compress.reporting.page import Page, Paragraph, Section, Table, change, figures, maybe, times
from compress.reporting.report_data import Quality, RunReport

BASELINE_TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Candidate:
    """One checkpoint.

    Attributes:
        size_bytes: of its weight files.
        kl: mean divergence from the dense model, in nats; None without a baseline.
        dominated_by: labels of those that are no worse in both figures and better in one; empty on the frontier.
    """

    label: str
    path: str
    size_bytes: int
    bits_per_weight: float
    bits_per_parameter: float
    perplexity: float
    kl: float | None
    kv_cache: str = "16bit"
    dominated_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidates in the order of their cost, with what they share. `cost_name`, `loss_name`: what the plot has on its
    axes."""

    source: str
    protocol: str
    baseline_perplexity: float | None
    dense_bytes: int
    cost_name: str
    loss_name: str
    candidates: tuple[Candidate, ...]

    def figures(self, candidate: Candidate) -> tuple[float, float]:
        """Cost and loss of a candidate: less is better in both."""
        return COSTS[self.cost_name](candidate), LOSSES[self.loss_name](candidate)


COSTS: dict[str, Callable[[Candidate], float]] = {
    "size": lambda each: each.size_bytes,
    "bits": lambda each: each.bits_per_parameter,
}
LOSSES: dict[str, Callable[[Candidate], float]] = {
    "kl": lambda each: float("inf") if each.kl is None else each.kl,
    "ppl": lambda each: each.perplexity,
}


def compare(reports: Sequence[RunReport], cost: str = "size", loss: str = "kl") -> Comparison:
    """Puts reports side by side and marks the dominated ones. Raises ToolkitError: fewer than two, an unknown axis, no
    quality measured, or figures that cannot be compared because source, text, protocol or baseline differ.

    Args:
        cost: `size` (of the weight files) or `bits` (stored bits per parameter of the whole model).
        loss: `kl` or `ppl`.
    """
    _check_choices(reports, cost, loss)
    measured = [_measured(report, loss) for report in reports]
    for report, quality in zip(reports[1:], measured[1:], strict=True):
        _require_equal(reports[0], report)
        _require_same_baseline(reports[0], report, measured[0], quality)
    candidates = [_candidate(*each) for each in zip(_labels(reports), reports, measured, strict=True)]
    unmarked = Comparison(
        source=reports[0].source,
        protocol=measured[0].protocol,
        baseline_perplexity=measured[0].baseline_perplexity,
        dense_bytes=reports[0].plan.bytes_before,
        cost_name=cost,
        loss_name=loss,
        candidates=tuple(candidates),
    )
    return judged_by(unmarked, loss)


def judged_by(comparison: Comparison, loss: str) -> Comparison:
    """The same candidates, dominated or not by another measure: `kl` or `ppl`."""
    judged = replace(comparison, loss_name=loss)
    marked = [_marked(each, judged) for each in comparison.candidates]
    return replace(judged, candidates=tuple(sorted(marked, key=judged.figures)))


def _check_choices(reports: Sequence[RunReport], cost: str, loss: str) -> None:
    if len(reports) < 2:
        raise ToolkitError(f"{len(reports)} checkpoint is nothing to compare", "Name at least two")
    folders = [report.path.resolve() for report in reports]
    if len(set(folders)) < len(folders):
        raise ToolkitError("one checkpoint is named twice", "Name each one once")
    for option, value, known in (("by", cost, COSTS), ("measure", loss, LOSSES)):
        if value not in known:
            raise ToolkitError(f"--{option} {value!r} is unknown", f"Use --{option} " + " or ".join(known))


def _measured(report: RunReport, loss: str) -> Quality:
    quality = report.quality
    if quality is None:
        reason = f" ({report.not_measured})" if report.not_measured else ""
        raise ToolkitError(
            f"{report.path} has no perplexity and no KL{reason}", "Leave it out, or repeat its run with measuring"
        )
    if loss == "kl" and quality.kl_mean is None:
        raise ToolkitError(f"{report.path} has no KL: there was no dense model to compare with", "Use --measure ppl")
    return quality


EQUAL = {
    "sources": "source",
    "sizes of the source": "plan.bytes_before",
    "evaluation texts (sha256)": "quality.data_sha256",
    "evaluation protocols": "quality.protocol",
    "numbers of evaluated tokens": "quality.tokens",
    "evaluation backends": "quality.backend",
    "evaluation dtypes": "quality.dtype",
}
"""Fields of reports that must be equal, by their names in errors."""


def _require_equal(first: RunReport, report: RunReport) -> None:
    for name, field in EQUAL.items():
        one, other = map(attrgetter(field), (first, report))
        if one != other:
            raise _differing(first, report, name, one, other)


def _require_same_baseline(first: RunReport, report: RunReport, reference: Quality, quality: Quality) -> None:
    """The same path may hold another model by now; its perplexity tells. Threads and machines move it a little."""
    one, other = reference.baseline_perplexity, quality.baseline_perplexity
    if (one is None) != (other is None) or (one and other and abs(other / one - 1) > BASELINE_TOLERANCE):
        raise _differing(first, report, "perplexities of the dense model", one, other)


def _differing(first: RunReport, report: RunReport, name: str, one: object, other: object) -> ToolkitError:
    return ToolkitError(
        f"{first.folder} and {report.folder} have different {name}: {one} and {other}",
        "Compare checkpoints of one source that were measured in the same way",
    )


def _labels(reports: Sequence[RunReport]) -> list[str]:
    """Folder names where they differ, whole paths where they do not."""
    names = [report.folder.resolve().name for report in reports]
    return names if len(set(names)) == len(names) else [str(report.folder) for report in reports]


def _candidate(label: str, report: RunReport, quality: Quality) -> Candidate:
    found = report.structure
    return Candidate(
        label=label,
        path=str(report.folder),
        size_bytes=found.total_bytes,
        bits_per_weight=found.bits_per_weight,
        bits_per_parameter=found.bits_per_parameter,
        perplexity=quality.perplexity,
        kl=quality.kl_mean,
        kv_cache=str(report.kv_cache.default) if report.kv_cache else EXACT,
    )


def _marked(candidate: Candidate, judged: Comparison) -> Candidate:
    here = judged.figures(candidate)
    figures = {other.label: judged.figures(other) for other in judged.candidates}
    better = [label for label, it in figures.items() if it != here and it[0] <= here[0] and it[1] <= here[1]]
    return replace(candidate, dominated_by=tuple(better))


COST_LABELS = {"size": "weights, MB", "bits": "stored bits per parameter of the whole model"}
LOSS_LABELS = {"kl": "Mean KL to the dense model, in nats", "ppl": "Perplexity"}
HEAD = ("checkpoint", "size", "bits per weight", "whole model", "perplexity", "change", "KL mean", "KV cache", "")
NUMERIC = (1, 2, 3, 4, 5, 6)


def compare_page(comparison: Comparison) -> Page:
    """Puts checkpoints on one page: the plots, the table, and how they were measured."""
    best = sum(not each.dominated_by for each in comparison.candidates)
    title = f"{len(comparison.candidates)} checkpoints of {comparison.source}"
    known, dense = comparison.baseline_perplexity, size(comparison.dense_bytes)
    dense += f", perplexity {known:.3f}" if known is not None else ""
    gain = times(comparison.dense_bytes, min(each.size_bytes for each in comparison.candidates))
    baseline = f"The dense source has {dense}; the smallest here is {gain}."
    sections = [
        Section.of("Frontier", figures(*_plots(comparison))),
        Section.of("Figures", Table(HEAD, table_rows(comparison), NUMERIC)),
        Section.of("How this was measured", Paragraph(comparison.protocol), Paragraph(baseline)),
    ]
    return Page(f"{title}: comparison", title, f"{best} of them on the frontier of size and quality", sections)


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Cells of the table, for the page and the terminal."""
    before = comparison.baseline_perplexity
    return [
        (
            each.label,
            size(each.size_bytes),
            f"{each.bits_per_weight:.3f}",
            f"{each.bits_per_parameter:.3f}",
            f"{each.perplexity:.3f}",
            change(before, each.perplexity) if before else "-",
            maybe(each.kl),
            each.kv_cache,
            f"dominated by {', '.join(each.dominated_by)}" if each.dominated_by else "frontier",
        )
        for each in comparison.candidates
    ]


def _plots(comparison: Comparison) -> list[Scatter]:
    """A plot for the measure asked for, then one for each other measure that every candidate has."""
    others = [name for name in LOSSES if name != comparison.loss_name]
    judged = [comparison, *(judged_by(comparison, name) for name in others)]
    return [_plot(each) for each in judged if all(isfinite(each.figures(one)[1]) for one in each.candidates)]


def _plot(comparison: Comparison) -> Scatter:
    marks = []
    for each in comparison.candidates:
        cost, loss = comparison.figures(each)
        title = f"{each.label}: {size(each.size_bytes)}, perplexity {each.perplexity:.3f}, KL {maybe(each.kl)}"
        mark = Mark(cost / (1e6 if comparison.cost_name == "size" else 1), loss, title)
        marks.append((mark, each.label, bool(each.dominated_by)))
    subtitle = "lower left is better; gray marks are dominated by another"
    return Scatter(LOSS_LABELS[comparison.loss_name], subtitle, marks, COST_LABELS[comparison.cost_name])
