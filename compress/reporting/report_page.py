"""The page of one run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.kv_cache import EXACT, KVCacheRecord, MeasuredKVCache
from compress.reporting import charts
from compress.reporting.charts import BOTTOM, MUTED, TOP, Bar, Mark, Series, bars, figure, lines
from compress.reporting.headers import Headers
from compress.reporting.html import bullets, facts, page, paragraph, section, table, tag, text
from compress.reporting.numbers import Axis, change, percent, short, size, times
from compress.reporting.report_data import KVCacheFacts, RunReport, SearchedUnit, SearchRecord

GIB = 2**30
HEAD = (
    "keys and values",
    "one token",
    "tokens per GiB",
    "KL mean",
    "KL 99.9 %",
    "perplexity",
    "change",
    "first token",
    "",
)
NUMERIC = (1, 2, 3, 4, 5, 6, 7)


def kv_section(report: RunReport) -> list[str]:
    """One section, or none where the recipe said nothing of the cache."""
    found = report.kv_cache
    if found is None:
        return []
    said = [] if not found.warning else [bullets([f"warning: {found.warning}"])]
    if found.record is None:
        return [section("KV cache", paragraph("Keys and values stay 16 bits; nothing was measured."), *said)]
    record = found.record
    measured = facts(
        [
            ("predicted tokens", f"{record.tokens:,}, in windows of {record.length:,}"),
            ("compared with", "this checkpoint with a cache of 16 bits"),
            ("limit", f"a mean KL of {record.max_kl:g}"),
            ("protocol", record.protocol),
        ]
    )
    drawn = tag("div", _bytes_chart(record), _cost_chart(record), class_="charts")
    return [section("KV cache", drawn, table(HEAD, _rows(found, record), NUMERIC), measured, *said)]


def _rows(found: KVCacheFacts, record: KVCacheRecord) -> list[tuple[str, ...]]:
    chosen = "the default" if found.default.is_exact else ""
    exact = (EXACT, size(record.token_bytes), _tokens(record.token_bytes), "0", "0", f"{record.perplexity:.3f}")
    rows: list[tuple[str, ...]] = [(*exact, "-", "-", chosen)]
    return rows + [_row(found, record, each) for each in record.candidates]


def _row(found: KVCacheFacts, record: KVCacheRecord, each: MeasuredKVCache) -> tuple[str, ...]:
    verdict = "within the limit" if record.passes(each) else "above the limit"
    return (
        str(each.scheme),
        size(each.token_bytes),
        _tokens(each.token_bytes),
        _kl(each),
        short(each.kl_p999),
        f"{each.perplexity:.3f}",
        change(record.perplexity, each.perplexity) if record.perplexity else "-",
        percent(each.top1_agreement),
        "the default" if each.scheme == found.default else verdict,
    )


def _kl(each: MeasuredKVCache) -> str:
    error = f" ± {each.kl_standard_error:.4f}" if each.kl_standard_error is not None else ""
    return f"{each.kl_mean:.4f}{error}"


def _tokens(token_bytes: int) -> str:
    return f"{GIB // token_bytes:,}" if token_bytes else "-"


def _bytes_chart(record: KVCacheRecord) -> str:
    rows = [Bar(EXACT, size(record.token_bytes), ((record.token_bytes, MUTED),))]
    rows += [Bar(str(each.scheme), size(each.token_bytes), ((each.token_bytes, 2),)) for each in record.candidates]
    subtitle = "keys and values of one token in all layers, with their scales"
    return figure("Bytes per token", subtitle, bars("Bytes of keys and values per token", rows))


def _cost_chart(record: KVCacheRecord) -> str:
    rows = [Bar(str(each.scheme), _kl(each), ((each.kl_mean, 0),)) for each in record.candidates]
    subtitle = "mean KL(16-bit cache || this), in nats, ± standard error over windows"
    return figure("What it costs", subtitle, bars("Divergence from a cache of 16 bits", rows)) if rows else ""


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


WORST = 8


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
        exceptions(report),
        verification(report),
        made(report),
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
