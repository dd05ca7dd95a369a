"""The diagrams of one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from compress.reporting.headers import Headers, KeyValues
from compress.reporting.html import tag, text
from compress.reporting.numbers import Axis, block_ticks, percent, short, size
from compress.reporting.report_data import Linear, RunReport, Smoothed

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 428, 12, 212
NUM_COLORS = 6
MUTED = -1
"""The colour of what others are compared with."""
_ROW = 40
_NAME = 26


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with what is said of it when the pointer rests on it."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of marks."""

    name: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar of one or more parts `(value, color)`, with its figure in words."""

    label: str
    figure: str
    parts: tuple[tuple[float, int], ...]


def figure(title: str, subtitle: str, drawing: str, legend: Sequence[tuple[int, str]] = ()) -> str:
    """A drawing under its title; the legend `(color, name)` is of the page, so that it wraps."""
    names = [tag("span", tag("i", class_=color_class(color)), text(name)) for color, name in legend]
    head = tag("figcaption", tag("b", text(title)), tag("span", text(subtitle)))
    return tag("figure", head, tag("div", *names, class_="legend") if names else "", drawing)


def color_class(index: int) -> str:
    """The class of the n-th colour; past the last they come again, dashed."""
    if index == MUTED:
        return "muted"
    return f"s{index % NUM_COLORS + 1}" + (" dashed" if index >= NUM_COLORS else "")


def lines(label: str, series: Sequence[Series], num_blocks: int, up: Axis) -> str:
    """Lines over the index of the block."""
    across = Axis(-0.5, num_blocks - 0.5, LEFT, RIGHT) if num_blocks < 12 else Axis(0, num_blocks - 1, LEFT + 6, RIGHT)
    parts = [*_rules(up), *_across([(across.place(index), str(index)) for index in block_ticks(num_blocks)], "block")]
    # Where marks stand close together, they are only there for the pointer.
    kind, radius = ("line", 3.5) if num_blocks <= 24 else ("line many", 5)
    for color, each in enumerate(series):
        places = [(across.place(mark.x), up.place(mark.y)) for mark in each.marks]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = (_dot(x, y, radius, mark.title) for (x, y), mark in zip(places, each.marks, strict=True))
        parts.append(tag("g", f'<polyline points="{path}"/>', *dots, class_=f"{kind} {color_class(color)}"))
    return drawing(label, HEIGHT, parts)


def bars(label: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars on one scale from 0, each under its label."""
    most = max(sum(value for value, _ in row.parts) for row in rows) or 1.0
    scale = Axis(0, most, 0, WIDTH - 4)
    parts = []
    for index, row in enumerate(rows):
        top, start = index * (_ROW + 8), 0.0
        parts.append(_text(0, top + 13, row.label, "ink"))
        parts.append(_text(WIDTH - 4, top + 13, row.figure, "ink strong", "end"))
        for value, color in row.parts:
            width = max(scale.place(value) - 1.5, 1.0)
            shape = f'<rect x="{start:.1f}" y="{top + 20}" width="{width:.1f}" height="16" rx="3">'
            title = f"<title>{text(f'{row.label}: {row.figure}')}</title></rect>"
            parts.append(tag("g", shape + title, class_=f"bar {color_class(color)}"))
            start += scale.place(value)
    return drawing(label, len(rows) * (_ROW + 8) - 4, parts)


def cells(label: str, rows: Sequence[tuple[str, Sequence[tuple[float, str] | None]]], most: float) -> str:
    """A grid: a row for each name, a column for each block, darker for larger values; `(value, title)` or nothing."""
    count = max(len(values) for _, values in rows)
    left = 16 + 8.6 * max(len(_ending(name)) for name, _ in rows)
    step, height = (RIGHT - left) / count, 24
    parts = []
    for row, (name, values) in enumerate(rows):
        y = row * (height + 2)
        parts.append(_text(left - 8, y + 16, _ending(name), "soft", "end", name))
        for column, cell in enumerate(values):
            if cell is not None:
                parts.append(_cell(left + column * step, y, max(step - 2, step * 0.85), height, cell, most))
    bottom = len(rows) * (height + 2)
    parts += [_text(left + (i + 0.5) * step, bottom + 15, str(i), "soft", "middle") for i in block_ticks(count)]
    parts.append(_text(RIGHT, bottom + 32, "block", "soft", "end"))
    return drawing(label, bottom + 38, parts)


def scatter(label: str, marks: Sequence[tuple[Mark, str, bool]], x_label: str, frontier: Sequence[Mark]) -> str:
    """Marks `(place, name, dominated)`, a stepped line through the best of them, and a name beside each."""
    across = Axis.spanning([mark.x for mark, _, _ in marks], LEFT + 8, RIGHT - 14, from_zero=False)
    up = Axis.spanning([mark.y for mark, _, _ in marks], BOTTOM, TOP, from_zero=False)
    ticks = [(across.place(value), short(value)) for value in across.ticks()]
    parts = [*_rules(up), *_across(ticks, x_label)]
    corners: list[str] = []
    for before, after in zip([None, *frontier], frontier, strict=False):
        if before is not None:
            corners.append(f"{across.place(after.x):.1f},{up.place(before.y):.1f}")
        corners.append(f"{across.place(after.x):.1f},{up.place(after.y):.1f}")
    parts.append(f'<polyline class="frontier" points="{" ".join(corners)}"/>')
    # Dominated ones first: the others are drawn over them.
    for mark, _, dominated in sorted(marks, key=lambda each: not each[2]):
        dot = _dot(across.place(mark.x), up.place(mark.y), 5, mark.title)
        parts.append(tag("g", dot, class_="mark dominated" if dominated else "mark s1"))
    places = [(across.place(mark.x), up.place(mark.y), name, dominated) for mark, name, dominated in marks]
    parts += _names(sorted(places, key=lambda place: place[1]))
    return drawing(label, HEIGHT, parts)


def drawing(label: str, height: float, parts: Sequence[str]) -> str:
    """A whole drawing, scaled to its column, with a name for readers who do not see it."""
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def _names(places: Sequence[tuple[float, float, str, bool]]) -> list[str]:
    """Names beside marks `(x, y, name, dominated)`, where nothing else stands: below and left of the frontier there are
    no marks, above and right of it only dominated ones. Names make room for each other, away from the frontier."""
    taken: list[tuple[float, float, float]] = []
    parts = []
    for x, y, name, dominated in places:
        shown = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
        room = 7.2 * len(shown)
        leftwards = x - 9 - room > LEFT if not dominated else x + 9 + room > RIGHT
        anchor, at, left = ("end", x - 9, x - 9 - room) if leftwards else ("start", x + 9, x + 9)
        beside = [other for begin, end, other in taken if left < end and begin < left + room]
        y = _free(y - 1, beside, -2) if dominated else _free(y + 4, beside, 2)
        taken.append((left, left + room, y))
        parts.append(_text(at, y, shown, "ink halo", anchor))
    return parts


def _free(y: float, taken: Sequence[float], step: int) -> float:
    """The first place from `y` on in steps of `step`, else the other way, that is inside and not taken by a name."""
    ways = [y + sign * step * number for sign in (1, -1) for number in range(HEIGHT)]
    inside = [place for place in ways if TOP <= place <= BOTTOM - 4]
    return next((place for place in inside if all(abs(place - other) >= 13 for other in taken)), y)


def _cell(x: float, y: float, width: float, height: float, cell: tuple[float, str], most: float) -> str:
    value, title = cell
    depth = 0.12 + 0.78 * min(max(value / most, 0.0), 1.0)
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2" fill-opacity="{depth:.2f}">'
    figures = f"{value:.3f}".rstrip("0").rstrip(".")
    has_room = width >= 9 * len(figures) + 2
    shown = _text(x + width / 2, y + 16, figures, "ink", "middle") if has_room else ""
    return tag("g", f"{box}<title>{text(title)}</title></rect>", class_="bar s1") + shown


def _ending(name: str) -> str:
    """As much of a dotted name as there is room for."""
    return name.rpartition(".")[2][-18:]


def _rules(up: Axis) -> list[str]:
    """Horizontal rules with their values."""
    parts = []
    for value in up.ticks():
        y = up.place(value)
        parts.append(f'<line class="rule" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 7, y + 4, short(value), "soft", "end"))
    return parts


def _across(ticks: Sequence[tuple[float, str]], label: str) -> list[str]:
    """The lower edge with its ticks `(pixel, label)`."""
    parts = [f'<line class="base" x1="{LEFT}" y1="{BOTTOM}" x2="{RIGHT}" y2="{BOTTOM}"/>']
    parts += [_text(x, BOTTOM + 17, name, "soft", "middle") for x, name in ticks]
    return [*parts, _text(RIGHT, BOTTOM + 34, label, "soft", "end")]


def _dot(x: float, y: float, radius: float, title: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{text(title)}</title></circle>'


def _text(x: float, y: float, content: str, kind: str, anchor: str = "start", title: str = "") -> str:
    more = f"<title>{text(title)}</title>" if title else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(content)}{more}</text>'


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
