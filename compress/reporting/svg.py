"""Diagrams as inline SVG: lines over depth, bars, cells and marks. Colours are the page's, so both themes fit.

All are drawn 440 wide and scaled to their column, which keeps their letters readable on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.reporting.axis import Axis, block_ticks, short
from compress.reporting.html import tag, text

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
