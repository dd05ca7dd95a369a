"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterable

from compress.reporting import charts, provenance
from compress.reporting.axis import short
from compress.reporting.headers import Headers
from compress.reporting.html import bullets, facts, page, paragraph, section, table, tag, text
from compress.reporting.kv_page import kv_section
from compress.reporting.run_report import RunReport
from compress.reporting.search_section import search_section
from compress.reporting.units import change, percent, size, times

WORST = 8
GIB = 2**30


def report_page(report: RunReport, headers: Headers) -> str:
    """One self-contained HTML page: what was done, what it saved, what it cost, and where."""
    return page(
        f"{report.name}: compression report",
        tag("h1", text(report.name)),
        paragraph(f"made from {report.source} by {report.tool} in {report.seconds:.1f} s", class_="lead"),
        _tiles(report),
        _sizes(report, headers),
        _quality(report),
        *kv_section(report),
        search_section(report),
        _errors(report),
        _bits(report, headers),
        _smoothing(report),
        _outliers(report),
        provenance.exceptions(report),
        provenance.verification(report),
        provenance.made(report),
        tag("footer", text(f"Written from {report.path.name}. Rest the pointer on a mark to read its value.")),
    )


def _tiles(report: RunReport) -> str:
    found, quality = report.verification, report.quality
    tiles = [
        _tile(
            size(found.total_bytes), f"{times(report.bytes_before, found.total_bytes)} than {size(report.bytes_before)}"
        ),
        _tile(
            f"{found.bits_per_weight:.3f} bits" if found.num_packed else "-",
            f"per packed weight; {found.bits_per_parameter:.3f} over the whole model",
        ),
    ]
    if quality is None:
        return tag("div", *tiles, _tile("-", "perplexity and KL were not measured"), class_="tiles")
    before = quality.baseline_perplexity
    beside = f"perplexity, {change(before, quality.perplexity)}; dense {before:.2f}" if before else "perplexity"
    tiles.append(_tile(f"{quality.perplexity:.2f}", beside))
    if quality.kl_mean is not None:
        tiles.append(_tile(f"{quality.kl_mean:.4f}", "mean KL to the dense model, in nats"))
    return tag("div", *tiles, class_="tiles")


def _tile(figure: str, meaning: str) -> str:
    return tag("div", tag("b", text(figure)), tag("span", text(meaning)), class_="tile")


def _sizes(report: RunReport, headers: Headers) -> str:
    memory = headers.key_values
    drawn = [charts.size_chart(report)]
    rows = []
    if memory is not None:
        chosen = report.kv_cache.token_bytes if report.kv_cache else None
        drawn.append(charts.memory_chart(report, memory, chosen or memory.token_bytes))
        each = f"2 x {memory.layers} layers x {memory.kv_heads} heads x {memory.head_dim} x {memory.dtype}"
        rows = [
            ("keys and values of one token", f"{size(memory.token_bytes)} ({each})"),
            ("tokens in one GiB of them", f"{GIB // memory.token_bytes:,}"),
        ]
    notes = [line for line in headers.missing if line.startswith("memory")]
    return section("Size and memory", _grid(drawn), facts(rows) if rows else "", *map(paragraph, notes))


def _quality(report: RunReport) -> str:
    quality = report.quality
    if quality is None:
        reason = report.not_measured or "no reason was recorded"
        return section("Quality", paragraph(f"Perplexity and KL were not measured: {reason}"))
    rows = [
        ("predicted tokens", f"{quality.tokens:,}"),
        ("protocol", quality.protocol),
        ("text", f"{quality.data}, sha256 {quality.data_sha256[:12]}"),
        ("computed by", f"{quality.backend}, dtype {quality.dtype}"),
    ]
    if quality.top1_agreement is not None:
        rows.insert(0, ("same first token", percent(quality.top1_agreement)))
    drawn = [charts.perplexity_chart(report), charts.divergence_chart(report)]
    body = (
        _grid(drawn) if any(drawn) else paragraph(f"Perplexity {quality.perplexity:.3f}; nothing to compare it with.")
    )
    warnings = bullets(f"warning: {line}" for line in quality.warnings) if quality.warnings else ""
    return section("Quality", body, facts(rows), warnings)


def _errors(report: RunReport) -> str:
    drawn = charts.error_charts(report)
    if not drawn:
        return section("Error of layers", paragraph("No layer was changed."))
    outputs = charts.output_error_chart(report)
    missing = "" if outputs else paragraph("Block outputs were not computed: this method needs no forward pass.")
    worst = sorted(report.linears, key=lambda linear: -linear.relative_error)[:WORST]
    rows = [(linear.module, _work(linear.method, linear.pruning), short(linear.relative_error)) for linear in worst]
    title = tag("summary", text(f"The {len(worst)} layers with the largest error"))
    listed = tag("details", title, table(("layer", "method", "relative error"), rows, (2,)))
    return section("Error of layers", _grid([*drawn, outputs]), missing, listed)


def _work(method: str, pruning: str) -> str:
    return " + ".join(each for each in (pruning, method if method != "none" else "") if each) or "-"


def _bits(report: RunReport, headers: Headers) -> str:
    zeros = [linear.zeros for linear in report.linears if linear.pruning]
    pruned = (
        f"Pruning made {percent(sum(zeros) / len(zeros))} of the weights of {len(zeros)} layers zero." if zeros else ""
    )
    drawn = charts.bits_chart(report, headers) or paragraph(_no_bits(headers))
    beside = _grid([drawn, charts.share_chart(report)])
    return section("Bits", beside, paragraph(pruned) if pruned else "", _plan_table(report))


def _no_bits(headers: Headers) -> str:
    return next((line for line in headers.missing if line.startswith("bits")), "No layer was packed.")


def _plan_table(report: RunReport) -> str:
    rows = [
        (
            kind.tensor,
            " x ".join(map(str, kind.shape)),
            kind.count,
            kind.becomes,
            size(kind.bytes_before),
            size(kind.bytes_after),
        )
        for kind in report.kinds
    ]
    return table(("tensor", "shape", "count", "becomes", "before", "after"), rows, (2, 4, 5))


def _smoothing(report: RunReport) -> str:
    drawn = charts.smoothing_charts(report)
    if not drawn:
        return section("Smoothing", paragraph("Nothing was smoothed: this method does not, or no layer could be."))
    edges = [edge for block in report.blocks for edge in block.smoothed]
    used = sum(edge.loss_after < edge.loss_before for edge in edges)
    return section(
        "Smoothing",
        _grid(drawn),
        paragraph(f"{used} of {len(edges)} smoothed{_rest(len(edges) - used)}"),
    )


def _rest(count: int) -> str:
    return f"; the other {count} stayed as they were because nothing was better." if count else "."


def _outliers(report: RunReport) -> str:
    drawn = charts.outlier_charts(report)
    body = _grid(drawn) if drawn else paragraph("Activation outliers were not recorded in this run.")
    return section("Outliers", body)


def _grid(drawn: Iterable[str]) -> str:
    return tag("div", *(each for each in drawn if each), class_="charts")
