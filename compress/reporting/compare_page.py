"""The page of a comparison."""

from __future__ import annotations

from math import isfinite

from compress.reporting.comparison import LOSSES, Candidate, Comparison, judged_by
from compress.reporting.html import page, paragraph, section, table, tag, text
from compress.reporting.svg import Mark, figure, scatter
from compress.reporting.units import change, maybe, size, times

COST_LABELS = {"size": "weights, MB", "bits": "stored bits per parameter of the whole model"}
LOSS_LABELS = {"kl": "Mean KL to the dense model, in nats", "ppl": "Perplexity"}
HEAD = ("checkpoint", "size", "bits per weight", "whole model", "perplexity", "change", "KL mean", "KV cache", "")
NUMERIC = (1, 2, 3, 4, 5, 6)


def compare_page(comparison: Comparison) -> str:
    """One self-contained HTML page: the plot, the table, and how the figures were measured."""
    best = sum(not each.dominated_by for each in comparison.candidates)
    title = f"{len(comparison.candidates)} checkpoints of {comparison.source}"
    return page(
        f"{title}: comparison",
        tag("h1", text(title)),
        paragraph(f"{best} of them nothing else here beats in both size and quality", class_="lead"),
        section("Frontier", tag("div", *_plots(comparison), class_="charts")),
        section("Figures", table(HEAD, table_rows(comparison), NUMERIC)),
        section("How this was measured", paragraph(comparison.protocol), paragraph(_baseline(comparison))),
    )


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Cells of the table, for the page and the terminal."""
    return [_row(comparison, each) for each in comparison.candidates]


def _row(comparison: Comparison, each: Candidate) -> tuple[str, ...]:
    before = comparison.baseline_perplexity
    return (
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


def _plots(comparison: Comparison) -> list[str]:
    """A plot for the measure asked for, then one for each other measure that every candidate has."""
    others = [name for name in LOSSES if name != comparison.loss_name]
    judged = [comparison, *(judged_by(comparison, name) for name in others)]
    return [_plot(each) for each in judged if all(isfinite(each.figures(one)[1]) for one in each.candidates)]


def _plot(comparison: Comparison) -> str:
    marks = [(_mark(comparison, each), each.label, bool(each.dominated_by)) for each in comparison.candidates]
    frontier = [mark for mark, _, dominated in marks if not dominated]
    loss = LOSS_LABELS[comparison.loss_name]
    drawing = scatter(f"Cost and {loss}", marks, COST_LABELS[comparison.cost_name], frontier)
    return figure(loss, "lower left is better; gray marks are dominated by another", drawing)


def _mark(comparison: Comparison, each: Candidate) -> Mark:
    cost, loss = comparison.figures(each)
    title = f"{each.label}: {size(each.size_bytes)}, perplexity {each.perplexity:.3f}, KL {maybe(each.kl)}"
    return Mark(cost / (1e6 if comparison.cost_name == "size" else 1), loss, title)


def _baseline(comparison: Comparison) -> str:
    smallest = min(each.size_bytes for each in comparison.candidates)
    known = comparison.baseline_perplexity
    dense = f", perplexity {known:.3f}" if known is not None else ""
    gain = times(comparison.dense_bytes, smallest)
    return f"The dense source has {size(comparison.dense_bytes)}{dense}; the smallest here is {gain}."
