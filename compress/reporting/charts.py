"""The diagrams of one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from compress.reporting.axis import Axis, short
from compress.reporting.headers import Headers, KeyValues
from compress.reporting.run_report import Linear, RunReport, Smoothed
from compress.reporting.svg import BOTTOM, MUTED, TOP, Bar, Mark, Series, bars, cells, figure, lines
from compress.reporting.units import percent, size

Value = Callable[[Linear], float | None]


def size_chart(report: RunReport) -> str:
    """Weight bytes of the source and of the checkpoint."""
    rows = [
        Bar("dense source", size(report.bytes_before), ((report.bytes_before, MUTED),)),
        Bar("this checkpoint", size(report.verification.total_bytes), ((report.verification.total_bytes, 0),)),
    ]
    return figure("Weights on disk", "bytes of the weight files", bars("Weights on disk before and after", rows))


def memory_chart(report: RunReport, memory: KeyValues, token_bytes: int) -> str:
    """Weights and the keys and values of one longest sequence, which take `token_bytes` each in this checkpoint."""
    parts = (
        ("dense source", report.bytes_before, memory.token_bytes * memory.max_tokens),
        ("this checkpoint", _stored(report), token_bytes * memory.max_tokens),
    )
    rows = [Bar(label, size(weights + cache), ((weights, 0), (cache, 2))) for label, weights, cache in parts]
    subtitle = f"weights as stored, and keys and values of one sequence of {memory.max_tokens:,} tokens"
    drawing = bars("Memory at serve time before and after", rows)
    return figure("Memory at serve time", subtitle, drawing, ((0, "weights"), (2, "keys and values")))


def perplexity_chart(report: RunReport) -> str:
    """Perplexity of the source and of the checkpoint; nothing without a baseline."""
    quality = report.quality
    if quality is None or quality.baseline_perplexity is None:
        return ""
    before, after = quality.baseline_perplexity, quality.perplexity
    rows = [
        Bar("dense source", f"{before:.3f}", ((before, MUTED),)),
        Bar("this checkpoint", f"{after:.3f}", ((after, 0),)),
    ]
    return figure("Perplexity", "lower is better; bars begin at 0", bars("Perplexity before and after", rows))


def divergence_chart(report: RunReport) -> str:
    """Mean and tail of the divergence; nothing where there was no baseline."""
    quality = report.quality
    if quality is None or quality.kl_mean is None or quality.kl_p999 is None:
        return ""
    error = f" ± {quality.kl_standard_error:.4f}" if quality.kl_standard_error is not None else ""
    rows = [
        Bar("mean over positions", f"{quality.kl_mean:.4f}{error}", ((quality.kl_mean, 0),)),
        Bar("99.9 % of positions are below", f"{quality.kl_p999:.4f}", ((quality.kl_p999, 0),)),
    ]
    subtitle = "KL(dense || this), in nats, ± standard error over windows; 0 is no change"
    return figure("Divergence from the dense model", subtitle, bars("Divergence from the dense model", rows))


def error_charts(report: RunReport) -> list[str]:
    """Relative error of every linear over depth, one diagram for each part of a block, all on one scale."""
    return _by_part(
        report, lambda linear: linear.relative_error, "Relative error of weights", "squared, weighted by the inputs"
    )


def outlier_charts(report: RunReport) -> list[str]:
    """How far each layer's largest input stands out; empty where that was not recorded."""
    subtitle = "largest input over the median channel's largest, before smoothing"
    return _by_part(report, lambda linear: linear.input_outlier, "Activation outliers", subtitle)


def output_error_chart(report: RunReport) -> str:
    """Error of each block's output; nothing where no block was run."""
    marks = [
        Mark(index, block.output_error, f"block {index} ({block.name}): {short(block.output_error)}")
        for index, block in enumerate(report.blocks)
        if block.output_error is not None
    ]
    if not marks:
        return ""
    up = Axis.spanning([mark.y for mark in marks], BOTTOM, TOP)
    drawing = lines("Output error over depth", [Series("block", tuple(marks))], len(report.blocks), up)
    return figure("Error of block outputs", _scaled("squared, over the square of what the block adds", up), drawing)


def bits_chart(report: RunReport, headers: Headers) -> str:
    """Stored bits per weight of every layer; nothing without the weight files."""
    grid: dict[str, list[list[float]]] = {}
    for index, block in enumerate(report.blocks):
        for linear in block.linears:
            if linear.module in headers.layer_bits:
                row = grid.setdefault(linear.kind, [[] for _ in report.blocks])
                row[index].append(headers.layer_bits[linear.module])
    if not grid:
        return ""
    rows = [
        (
            kind,
            [
                (sum(found) / len(found), f"{kind}, block {index}: {sum(found) / len(found):.3f} bits")
                if found
                else None
                for index, found in enumerate(values)
            ],
        )
        for kind, values in grid.items()
    ]
    subtitle = "stored bits per weight: values, places, scales, zero points"
    return figure("Bits of each layer", subtitle, cells("Bits of each layer", rows, 16))


def share_chart(report: RunReport) -> str:
    """How much of each block was pruned; nothing where all blocks were pruned alike."""
    if not report.shares:
        return ""
    numbers = {block.name: index for index, block in enumerate(report.blocks)}
    marks = [
        Mark(
            numbers.get(each.block, 0),
            each.share,
            f"{each.block}: {f'{each.pattern}, ' if each.pattern else ''}{percent(each.share)} pruned, "
            f"{percent(each.outlier_ratio)} outliers",
        )
        for each in report.shares
    ]
    up = Axis.spanning([mark.y for mark in marks], BOTTOM, TOP, may_log=False)
    drawing = lines("Pruned share over depth", [Series("block", tuple(marks))], len(report.blocks), up)
    return figure("Pruned share of blocks", "share of the weights that went; blocks with outliers are spared", drawing)


def smoothing_charts(report: RunReport) -> list[str]:
    """What smoothing gained, and the exponent it chose; empty where nothing was smoothed."""
    gains = _smoothed_series(report, lambda edge: edge.gain, percent)
    if not gains:
        return []
    exponents = _smoothed_series(report, lambda edge: edge.exponent, short)
    legend = list(enumerate(each.name for each in gains))
    count = len(report.blocks)
    shares = Axis.spanning([mark.y for each in gains for mark in each.marks], BOTTOM, TOP, may_log=False)
    powers = Axis.spanning([mark.y for each in exponents for mark in each.marks], BOTTOM, TOP, may_log=False)
    return [
        figure(
            "Loss that smoothing took away",
            "share of the loss of plain rounding; by what was smoothed",
            lines("Smoothing gains over depth", gains, count, shares),
            legend,
        ),
        figure(
            "Exponent chosen",
            "of the input magnitudes; 0 is no smoothing",
            lines("Smoothing exponents over depth", exponents, count, powers),
            legend,
        ),
    ]


def _by_part(report: RunReport, value: Value, title: str, subtitle: str) -> list[str]:
    series: dict[str, list[Series]] = {}
    kinds = {linear.kind: None for linear in report.linears}
    for kind in kinds:
        marks = tuple(_kind_marks(report, kind, value))
        if marks:
            part = kind.rpartition(".")[0]
            series.setdefault(part, []).append(Series(kind.rpartition(".")[2], marks))
    values = [mark.y for part in series.values() for each in part for mark in each.marks]
    if not values:
        return []
    up = Axis.spanning(values, BOTTOM, TOP)
    return [
        figure(
            f"{title}: {part}" if part else title,
            _scaled(subtitle, up),
            lines(f"{title} over depth: {part}", each, len(report.blocks), up),
            list(enumerate(one.name for one in each)),
        )
        for part, each in series.items()
    ]


def _scaled(subtitle: str, up: Axis) -> str:
    return f"{subtitle}; logarithmic scale" if up.is_log else subtitle


def _kind_marks(report: RunReport, kind: str, value: Value) -> Iterable[Mark]:
    """One mark for each block; several linears of a kind (experts) as their mean."""
    for index, block in enumerate(report.blocks):
        found = [value(linear) for linear in block.linears if linear.kind == kind]
        known = [each for each in found if each is not None]
        if known:
            mean = sum(known) / len(known)
            several = f", mean of {len(known)}" if len(known) > 1 else ""
            yield Mark(index, mean, f"{kind}, block {index}: {short(mean)}{several}")


def _smoothed_series(
    report: RunReport, value: Callable[[Smoothed], float], shown: Callable[[float], str]
) -> list[Series]:
    marks: dict[str, list[Mark]] = {}
    for index, block in enumerate(report.blocks):
        for edge in block.smoothed:
            title = f"{edge.kind}, block {index}: {shown(value(edge))}"
            marks.setdefault(edge.kind, []).append(Mark(index, value(edge), title))
    return [Series(kind, tuple(found)) for kind, found in marks.items()]


def _stored(report: RunReport) -> int:
    return report.verification.total_bytes
