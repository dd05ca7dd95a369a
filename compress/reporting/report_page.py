"""The page of one run and its diagrams."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from compress.checkpoint.kv_cache import EXACT, KVCacheRecord, MeasuredKVCache
from compress.common.evaluation import Evaluation
from compress.common.files import size
from compress.reporting.experts_section import experts_section
from compress.reporting.figures import MUTED, Bar, Bars, Cells, Figure, Lines, Mark, Series
from compress.reporting.gate_section import gate_section
from compress.reporting.page import (
    Facts,
    Listing,
    Page,
    Paragraph,
    Section,
    Table,
    bullets,
    change,
    figures,
    percent,
    short,
    times,
)
from compress.reporting.report_data import (
    Headers,
    KeyValues,
    KVCacheFacts,
    Linear,
    Quality,
    RunReport,
    SearchedUnit,
    SearchRecord,
    Smoothed,
)

GIB = 2**30
WORST = 8


def report_page(report: RunReport, headers: Headers) -> Page:
    """Puts a run on one page: sizes, quality, and errors, bits and smoothing over depth."""
    sections = [
        _sizes(report, headers),
        _quality(report),
        gate_section(report),
        _kv_cache(report.kv_cache),
        _search(report),
        _errors(report),
        _bits(report, headers),
        _smoothing(report),
        _outliers(report),
        experts_section(report),
        _exceptions(report),
        _verification(report),
        _provenance(report),
    ]
    return Page(
        title=f"{report.name}: compression report",
        heading=report.name,
        lead=f"made from {report.source} by {report.tool} in {report.seconds:.1f} s",
        tiles=_tiles(report),
        sections=[section for section in sections if section is not None],
        footer=f"Written from {report.path.name}. Rest the pointer on a mark to read its value.",
    )


def _tiles(report: RunReport) -> list[tuple[str, str]]:
    found, quality = report.structure, report.quality
    smaller = f"{times(report.plan.bytes_before, found.total_bytes)} than {size(report.plan.bytes_before)}"
    bits = f"{found.bits_per_weight:.3f} bits" if found.num_quantized else "-"
    tiles = [
        (size(found.total_bytes), smaller),
        (bits, f"per packed weight; {found.bits_per_parameter:.3f} over the whole model"),
    ]
    if quality is None:
        return [*tiles, ("-", "perplexity and KL were not measured")]
    before = quality.baseline_perplexity
    beside = f"perplexity, {change(before, quality.perplexity)}; dense {before:.2f}" if before else "perplexity"
    tiles.append((f"{quality.perplexity:.2f}", beside))
    if quality.kl_mean is not None:
        tiles.append((f"{quality.kl_mean:.4f}", "mean KL to the dense model, in nats"))
    return tiles


def _sizes(report: RunReport, headers: Headers) -> Section:
    memory = headers.key_values
    before, after = report.plan.bytes_before, report.structure.total_bytes
    weights = _two_bars("Weights on disk", "bytes of the weight files", before, after, size)
    drawn = figures(weights, _memory_bars(report, memory) if memory else None)
    if memory is None:
        return Section.of("Size and memory", drawn, Paragraph(headers.no_memory))
    rows = [
        ("keys and values of one token", f"{size(memory.token_bytes)} ({memory.layout})"),
        ("tokens in one GiB of them", f"{GIB // memory.token_bytes:,}"),
    ]
    return Section.of("Size and memory", drawn, Facts(rows))


def _two_bars(title: str, subtitle: str, before: float, after: float, shown: Callable[[float], str]) -> Bars:
    rows = [Bar("dense source", shown(before), ((before, MUTED),)), Bar("this checkpoint", shown(after), ((after, 0),))]
    return Bars(title, subtitle, rows)


def _memory_bars(report: RunReport, memory: KeyValues) -> Bars:
    """Weights, and keys and values of one longest sequence in the chosen form."""
    chosen = report.kv_cache.token_bytes if report.kv_cache else None
    parts = (
        ("dense source", report.plan.bytes_before, memory.token_bytes * memory.max_tokens),
        ("this checkpoint", report.structure.total_bytes, (chosen or memory.token_bytes) * memory.max_tokens),
    )
    rows = [Bar(label, size(weights + cache), ((weights, 0), (cache, 2))) for label, weights, cache in parts]
    subtitle = f"weights as stored, and keys and values of one sequence of {memory.max_tokens:,} tokens"
    return Bars("Memory at serve time", subtitle, rows, ((0, "weights"), (2, "keys and values")))


def _quality(report: RunReport) -> Section:
    quality = report.quality
    if quality is None:
        reason = report.not_measured or "no reason was recorded"
        return Section.of("Quality", Paragraph(f"Perplexity and KL were not measured: {reason}"))
    rows = [
        ("predicted tokens", f"{quality.tokens:,}"),
        ("protocol", quality.protocol),
        ("text", f"{quality.data}, sha256 {quality.data_sha256[:12]}"),
        ("computed by", f"{quality.backend}, dtype {quality.dtype}"),
    ]
    rows = [*Evaluation.from_dict(quality.model_dump()).comparison(), *rows]
    alone = Paragraph(f"Perplexity {quality.perplexity:.3f}; nothing to compare it with.")
    before, subtitle = quality.baseline_perplexity, "lower is better; bars begin at 0"
    both = None if before is None else _two_bars("Perplexity", subtitle, before, quality.perplexity, "{:.3f}".format)
    drawn = figures(both, _divergence_bars(quality))
    return Section.of("Quality", drawn or alone, Facts(rows), bullets(f"warning: {line}" for line in quality.warnings))


def _divergence_bars(quality: Quality) -> Bars | None:
    if quality.kl_mean is None or quality.kl_p999 is None:
        return None
    mean = _with_error(quality.kl_mean, quality.kl_standard_error)
    rows = [
        Bar("mean over positions", mean, ((quality.kl_mean, 0),)),
        Bar("99.9 % of positions are below", f"{quality.kl_p999:.4f}", ((quality.kl_p999, 0),)),
    ]
    subtitle = "KL(dense || this), in nats, ± standard error over windows; 0 means no change"
    return Bars("Divergence from the dense model", subtitle, rows)


def _with_error(mean: float, error: float | None) -> str:
    return f"{mean:.4f} ± {error:.4f}" if error is not None else f"{mean:.4f}"


KV_HEAD = ("form", "one token", "tokens per GiB", "KL mean", "KL 99.9 %", "perplexity", "change", "first token", "")


def _kv_cache(found: KVCacheFacts | None) -> Section | None:
    if found is None:
        return None
    warnings = bullets([f"warning: {found.warning}"] if found.warning else [])
    record = found.measured
    if record is None:
        nothing = Paragraph("Keys and values stay 16 bits; nothing was measured.")
        return Section.of("KV cache", nothing, warnings)
    exact = (EXACT, size(record.token_bytes), _per_gib(record.token_bytes), "0", "0", f"{record.perplexity:.3f}")
    rows: list[tuple[str, ...]] = [(*exact, "-", "-", "the default" if found.default.is_exact else "")]
    rows += [_kv_row(found, record, each) for each in record.candidates]
    facts = [
        ("predicted tokens", f"{record.tokens:,}, in windows of {record.length:,}"),
        ("compared with", "this checkpoint with a cache of 16 bits"),
        ("limit", f"a mean KL of {record.max_kl:g}"),
        ("protocol", record.protocol),
    ]
    drawn = figures(_kv_bytes_bars(record), _kv_cost_bars(record))
    return Section.of("KV cache", drawn, Table(KV_HEAD, rows, range(1, 8)), Facts(facts), warnings)


def _kv_row(found: KVCacheFacts, record: KVCacheRecord, each: MeasuredKVCache) -> tuple[str, ...]:
    verdict = "within the limit" if record.passes(each) else "above the limit"
    return (
        str(each.scheme),
        size(each.token_bytes),
        _per_gib(each.token_bytes),
        _with_error(each.kl_mean, each.kl_standard_error),
        short(each.kl_p999),
        f"{each.perplexity:.3f}",
        change(record.perplexity, each.perplexity) if record.perplexity else "-",
        percent(each.top1_agreement),
        "the default" if each.scheme == found.default else verdict,
    )


def _per_gib(token_bytes: int) -> str:
    return f"{GIB // token_bytes:,}" if token_bytes else "-"


def _kv_bytes_bars(record: KVCacheRecord) -> Bars:
    rows = [Bar(EXACT, size(record.token_bytes), ((record.token_bytes, MUTED),))]
    rows += [Bar(str(each.scheme), size(each.token_bytes), ((each.token_bytes, 2),)) for each in record.candidates]
    return Bars("Bytes per token", "keys and values of one token in all layers, with their scales", rows)


def _kv_cost_bars(record: KVCacheRecord) -> Bars | None:
    rows = [
        Bar(str(each.scheme), _with_error(each.kl_mean, each.kl_standard_error), ((each.kl_mean, 0),))
        for each in record.candidates
    ]
    subtitle = "mean KL(16-bit cache || this), in nats, ± standard error over windows"
    return Bars("Divergence from a 16-bit cache", subtitle, rows) if rows else None


def _search(report: RunReport) -> Section | None:
    search = report.search
    if search is None:
        return None
    note = (
        f"Target: {search.target}. Sensitivities were measured on {search.measured_tokens:,} tokens of calibration "
        "text that no method saw."
    )
    drawn = figures(_sensitivities(report, search), _sums_bars(report, search))
    return Section.of("Search", Paragraph(note), drawn, _tries(search), _choices(search))


def _sensitivities(report: RunReport, search: SearchRecord) -> Lines | None:
    """KL of each unit alone over depth; None where no unit stands in a block."""
    scheme = search.typical
    marks: dict[str, list[Mark]] = {}
    for unit in search.units:
        place = _place(report, unit)
        if place is not None and scheme in unit.sensitivity:
            index, kind = place
            value = unit.sensitivity[scheme]
            title = f"{kind}, block {index}: KL {short(value)} as {scheme}; chosen: {unit.chosen}"
            marks.setdefault(kind, []).append(Mark(index, value, title))
    subtitle = f"KL of the whole model when only these layers are {scheme}, in nats"
    return _lines(report, "Sensitivity of layers", subtitle, marks)


def _place(report: RunReport, unit: SearchedUnit) -> tuple[int, str] | None:
    """Index of the block and the last parts of the names; None for layers outside of blocks."""
    for index, block in enumerate(report.blocks):
        if unit.modules[0].startswith(f"{block.block}."):
            return index, ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in unit.modules))
    return None


def _sums_bars(report: RunReport, search: SearchRecord) -> Bars:
    rows = [Bar(f"{scheme} everywhere", f"{total:.4f}", ((total, MUTED),)) for scheme, total in search.uniform.items()]
    rows.append(Bar("chosen, predicted", f"{search.predicted:.4f}", ((search.predicted, 0),)))
    measured = report.quality.kl_mean if report.quality else None
    if measured is not None:
        rows.append(Bar("chosen, measured", f"{measured:.4f}", ((measured, 1),)))
    rows.sort(key=lambda row: -row.parts[0][0])
    subtitle = "sums of sensitivities, in nats; measured: the finished checkpoint on the evaluation text"
    return Bars("Predicted and measured KL", subtitle, rows)


def _choices(search: SearchRecord) -> Table:
    schemes = list(dict.fromkeys(scheme for unit in search.units for scheme in unit.sensitivity))
    rows = [
        (
            ", ".join(dict.fromkeys((unit.modules[0], *(each.rpartition(".")[2] for each in unit.modules[1:])))),
            unit.chosen,
            *(short(unit.sensitivity[scheme]) if scheme in unit.sensitivity else "-" for scheme in schemes),
        )
        for unit in search.units
    ]
    head = ("layers", "chosen", *(f"KL as {each}" for each in schemes))
    return Table(head, rows, range(2, len(head)), f"The {len(search.units)} choices")


def _tries(search: SearchRecord) -> Table | None:
    rows = [
        (number, f"{each.predicted:.4f}", f"{each.measured:.4f}", size(each.bytes))
        for number, each in enumerate(search.tries, 1)
    ]
    return Table(("try", "predicted KL", "measured KL", "size"), rows, range(4)) if rows else None


def _errors(report: RunReport) -> Section:
    subtitle = "squared, weighted by the inputs"
    drawn = _by_part(report, lambda linear: linear.relative_error, "Relative error of weights", subtitle)
    if not drawn:
        return Section.of("Error of layers", Paragraph("No layer was changed."))
    outputs = _output_errors(report)
    missing = None if outputs else Paragraph("Block outputs were not computed: this method needs no forward pass.")
    worst = sorted(report.linears, key=lambda linear: -linear.relative_error)[:WORST]
    rows = [(linear.module, _work(linear), short(linear.relative_error)) for linear in worst]
    listed = Table(("layer", "method", "relative error"), rows, (2,), f"The {len(worst)} layers with the largest error")
    return Section.of("Error of layers", figures(*drawn, outputs), missing, listed)


def _work(linear: Linear) -> str:
    return " + ".join(each for each in (linear.pruning, linear.method) if each and each != "none") or "-"


def _output_errors(report: RunReport) -> Lines | None:
    marks = [
        Mark(index, block.relative_error, f"block {index} ({block.block}): {short(block.relative_error)}")
        for index, block in enumerate(report.blocks)
        if block.relative_error is not None
    ]
    subtitle = "squared, over the square of what the block adds"
    return _lines(report, "Error of block outputs", subtitle, {"block": marks} if marks else {})


def _bits(report: RunReport, headers: Headers) -> Section:
    zeros = [linear.zeros or 0.0 for linear in report.linears if linear.pruning]
    share = percent(sum(zeros) / max(1, len(zeros)))
    pruned = Paragraph(f"Pruning made {share} of the weights of {len(zeros)} layers zero.") if zeros else None
    cells = _bits_cells(report, headers)
    missing = None if cells else Paragraph(headers.no_bits or "No layer was packed.")
    rows = [
        (
            row.name,
            " x ".join(map(str, row.shape)),
            row.count,
            row.becomes,
            *map(size, (row.bytes_before, row.bytes_after)),
        )
        for row in report.plan.layers
    ]
    plan = Table(("tensor", "shape", "count", "becomes", "before", "after"), rows, (2, 4, 5))
    return Section.of("Bits", figures(cells, _share_lines(report)), missing, pruned, plan)


def _bits_cells(report: RunReport, headers: Headers) -> Cells | None:
    bits = headers.layer_bits
    series = _kind_series(report, lambda linear: bits.get(linear.module), lambda value: f"{value:.3f} bits")
    subtitle = "stored bits per weight: values, indices, scales, zero points"
    return Cells("Bits of each layer", subtitle, series, len(report.blocks), 16) if series else None


def _share_lines(report: RunReport) -> Lines | None:
    numbers = {block.block: index for index, block in enumerate(report.blocks)}
    marks = [
        Mark(
            numbers.get(each.block, 0),
            each.share,
            f"{each.block}: {f'{each.pattern}, ' if each.pattern else ''}{percent(each.share)} pruned, "
            f"{percent(each.outlier_ratio)} outliers",
        )
        for each in report.layerwise or ()
    ]
    subtitle = "share of pruned weights; blocks with more outliers keep more"
    return _lines(report, "Pruned share of blocks", subtitle, {"block": marks} if marks else {}, may_log=False)


def _smoothing(report: RunReport) -> Section:
    edges = [edge for block in report.blocks for edge in block.smoothing]
    if not edges:
        reason = "Nothing was smoothed: this method does not, or no layer could be."
        return Section.of("Smoothing", Paragraph(reason))
    gains = _smoothed(report, lambda edge: edge.gain, percent)
    exponents = _smoothed(report, lambda edge: edge.ratio, short)
    used = sum(edge.loss_after < edge.loss_before for edge in edges)
    rest = f"; the other {len(edges) - used} stayed as they were because nothing was better." * (used < len(edges))
    return Section.of(
        "Smoothing",
        figures(
            _lines(report, "Loss removed by smoothing", "share of the loss of plain rounding", gains, may_log=False),
            _lines(report, "Exponent", "of the input magnitudes; 0 means no smoothing", exponents, may_log=False),
        ),
        Paragraph(f"{used} of {len(edges)} smoothed{rest or '.'}"),
    )


def _smoothed(
    report: RunReport, value: Callable[[Smoothed], float], shown: Callable[[float], str]
) -> dict[str, list[Mark]]:
    marks: dict[str, list[Mark]] = {}
    for index, block in enumerate(report.blocks):
        for edge in block.smoothing:
            kind = block.kind(edge.source)
            marks.setdefault(kind, []).append(Mark(index, value(edge), f"{kind}, block {index}: {shown(value(edge))}"))
    return marks


def _outliers(report: RunReport) -> Section:
    subtitle = "largest input over the median channel's largest, before smoothing"
    drawn = _by_part(report, lambda linear: linear.input_outlier, "Activation outliers", subtitle)
    missing = Paragraph("Activation outliers were not recorded in this run.")
    return Section.of("Outliers", figures(*drawn) or missing)


Value = Callable[[Linear], float | None]


def _by_part(report: RunReport, value: Value, title: str, subtitle: str) -> list[Figure]:
    """One diagram for each part of a block, with a line for each of its linears, all on one scale."""
    parts: dict[str, dict[str, list[Mark]]] = {}
    for each in _kind_series(report, value, short):
        part, _, name = each.name.rpartition(".")
        parts.setdefault(part, {})[name] = list(each.marks)
    values = [mark.y for part in parts.values() for marks in part.values() for mark in marks]
    drawn = [
        _lines(report, f"{title}: {part}" if part else title, subtitle, marks, limits=(min(values), max(values)))
        for part, marks in parts.items()
    ]
    return [each for each in drawn if each is not None]


def _kind_series(report: RunReport, value: Value, shown: Callable[[float], str]) -> list[Series]:
    """One mark for each block; several linears of a kind (experts) as their mean."""
    marks: dict[str, list[Mark]] = {}
    for index, block in enumerate(report.blocks):
        known: dict[str, list[float]] = {}
        for linear in block.linears:
            found = value(linear)
            if found is not None:
                known.setdefault(block.kind(linear.module), []).append(found)
        for kind, values in known.items():
            mean = sum(values) / len(values)
            several = f", mean of {len(values)}" if len(values) > 1 else ""
            marks.setdefault(kind, []).append(Mark(index, mean, f"{kind}, block {index}: {shown(mean)}{several}"))
    return [Series(kind, tuple(found)) for kind, found in marks.items()]


def _lines(
    report: RunReport,
    title: str,
    subtitle: str,
    marks: Mapping[str, list[Mark]],
    *,
    may_log: bool = True,
    limits: tuple[float, float] | None = None,
) -> Lines | None:
    """Lines over depth; None without any."""
    if not marks:
        return None
    series = [Series(name, tuple(found)) for name, found in marks.items()]
    drawn = Lines(title, subtitle, series, len(report.blocks), may_log, limits)
    return replace(drawn, subtitle=f"{subtitle}; logarithmic scale") if drawn.is_log else drawn


def _exceptions(report: RunReport) -> Section:
    """Fallbacks, notes, and tensors that were kept dense."""
    fallbacks = [(linear.module, linear.recovery) for linear in report.linears if linear.recovery]
    dense = [(kind.name, kind.count, size(kind.bytes_after), kind.reason) for kind in report.plan.layers if kind.reason]
    return Section.of(
        "Exceptions and notes",
        Table(("layer", "fallback"), fallbacks) if fallbacks else Paragraph("No fallback was needed."),
        bullets(report.plan.notes),
        Table(("kept dense", "count", "size", "why"), dense, (1, 2)) if dense else None,
    )


def _verification(report: RunReport) -> Section:
    found = report.structure
    schemes = Counter(found.quantized.values())
    rows = [
        ("format", found.format),
        ("compared bit for bit", f"{report.bit_compared} layers, with the codes chosen"),
        ("packed layers", ", ".join(f"{count} as {name}" for name, count in sorted(schemes.items())) or "none"),
        ("parameters", f"{found.num_parameters:,}, of which {found.num_quantized:,} are packed"),
    ]
    again = f"Re-read from the disk when it was finished. To check it again: compress verify {report.folder}"
    return Section.of(
        "Verification",
        Paragraph("sound", "good") if found.ok else Paragraph("not sound", "bad"),
        Facts(rows),
        bullets([*found.problems, *found.notes]),
        Paragraph(again, "soft"),
    )


def _provenance(report: RunReport) -> Section:
    calibration = report.calibration or {}
    rows: list[tuple[str, object]] = [
        ("source", report.source),
        ("seed", report.seed),
        ("tool", report.tool),
        ("seconds", f"{report.seconds:.1f}"),
        ("calibration", _calibration(calibration)),
        *report.environment.items(),
    ]
    warnings = calibration.get("warnings")
    listed = bullets(f"calibration: {line}" for line in warnings) if isinstance(warnings, list) else None
    recipe = json.dumps(report.recipe, indent=2, ensure_ascii=False)
    return Section.of("How it was made", Facts(rows), listed, Listing("Recipe", recipe))


def _calibration(fields: Mapping[str, Any]) -> str:
    if not fields:
        return "none: the method needs no data"
    amount = f"{fields.get('sequences', '?')} sequences of {fields.get('length', '?')} tokens"
    digest = str(fields.get("token_sha256", ""))[:12]
    return f"{fields.get('source', '?')}: {amount}; {fields.get('description', '')}; token sha256 {digest}"
