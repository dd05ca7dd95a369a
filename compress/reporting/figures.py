"""Kinds of diagrams: each holds its data, and is a drawing, or a table where matplotlib is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from compress.common.plots import COLORS, Canvas, color, draw_svg, svg_inline, use_short_numbers
from compress.reporting.page import maybe, printable, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH = 480
MUTED = -1
"""Colour index of what others are compared with."""
_BAR = 46
_LEGEND = 26
_NAME = 26
_LOG_FROM = 20.0
_HIDDEN: dict[str, Any] = {"markerfacecolor": (1, 1, 1, 0.01), "markeredgewidth": 0}
_DENSE = 24
"""Most blocks whose marks are visible; beyond it they only carry tooltips."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with its tooltip."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """A named sequence of marks."""

    name: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar of one or more parts `(value, color)`, with its value as text."""

    label: str
    figure: str
    parts: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A diagram under its title."""

    title: str
    subtitle: str
    numeric: ClassVar[tuple[int, ...]] = ()

    @property
    def height(self) -> float:
        return 250

    def svg(self) -> str:
        """An `svg` element for an HTML page; needs matplotlib."""
        return svg_inline(draw_svg(self.paint, WIDTH, self.height, self.title))

    def paint(self, canvas: Canvas) -> None:
        raise NotImplementedError

    @property
    def head(self) -> tuple[str, ...]:
        """Column names of the table."""
        raise NotImplementedError

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Bars(Figure):
    """Horizontal bars on one scale from 0, each under its label; `legend` names colors `(index, name)`."""

    bars: Sequence[Bar]
    legend: Sequence[tuple[int, str]] = ()

    @property
    def height(self) -> float:
        return _BAR * len(self.bars) + (_LEGEND if self.legend else 4)

    head = "", "value"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [(bar.label, bar.figure) for bar in self.bars]

    def paint(self, canvas: Canvas) -> None:
        from matplotlib.patches import Patch

        axes = canvas.figure.subplots()
        axes.set_axis_off()
        for row, bar in enumerate(self.bars):
            start = 0.0
            for value, index in bar.parts:
                (drawn,) = axes.barh(row, value, 0.36, start, color=_color(index), edgecolor=COLORS["card"])
                canvas.tip(drawn, f"{bar.label}: {bar.figure}")
                start += value
            place = axes.get_yaxis_transform()
            axes.text(0, row - 0.28, printable(bar.label), transform=place)
            axes.text(1, row - 0.28, bar.figure, transform=place, ha="right", weight="bold")
        axes.set_xlim(0, max(sum(value for value, _ in bar.parts) for bar in self.bars) or 1)
        axes.set_ylim(len(self.bars) - 0.75, -0.72)
        if self.legend:
            patches = [Patch(color=_color(index), label=name) for index, name in self.legend]
            canvas.figure.legend(handles=patches, loc="outside upper left", ncols=len(patches), borderpad=0)


@dataclass(frozen=True, slots=True)
class OverDepth(Figure):
    """Series over the index of the block."""

    series: Sequence[Series]
    num_blocks: int

    @property
    def head(self) -> tuple[str, ...]:
        return "block", *(each.name for each in self.series)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        found = [{int(mark.x): mark.y for mark in each.marks} for each in self.series]
        return [
            (str(index), *(maybe(values.get(index)) for values in found))
            for index in range(self.num_blocks)
            if any(index in values for values in found)
        ]

    def label_blocks(self, axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.set_xlim(-0.5, self.num_blocks - 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.set_xlabel("block", loc="right")


@dataclass(frozen=True, slots=True)
class Lines(OverDepth):
    """Lines over depth; logarithmic where values differ by more than 20 times, if `may_log`. `limits`: least and
    largest value, also of other diagrams on the same scale; None is those of `series`."""

    may_log: bool = True
    limits: tuple[float, float] | None = None

    @property
    def _range(self) -> tuple[float, float]:
        values = [mark.y for each in self.series for mark in each.marks]
        return self.limits or (min(values), max(values))

    @property
    def is_log(self) -> bool:
        return self.may_log and _is_log(self._range)

    @property
    def height(self) -> float:
        return 240 + (0 if len(self.series) < 2 else 18 * -(-len(self.series) // self._columns))

    @property
    def _columns(self) -> int:
        longest = max(len(_fitted(each.name)) for each in self.series)
        return max(1, min(len(self.series), int(WIDTH // (7.2 * longest + 34))))

    def paint(self, canvas: Canvas) -> None:
        axes = canvas.figure.subplots()
        for index, each in enumerate(self.series):
            hidden = _HIDDEN if self.num_blocks > _DENSE else {}
            (line,) = axes.plot(
                [mark.x for mark in each.marks],
                [mark.y for mark in each.marks],
                color=color(index),
                linestyle="-" if index < 6 else "--",
                marker="o",
                label=_fitted(each.name),
                **hidden,
            )
            canvas.tip(line, *(mark.title for mark in each.marks))
        low, high = self._range
        axes.set_ylim(*((low / 1.3, high * 1.3) if self.is_log else (min(low, 0), max(1.08 * high, 1e-30))))
        use_short_numbers(axes, short, is_log=self.is_log)
        self.label_blocks(axes)
        if len(self.series) > 1:
            canvas.figure.legend(loc="outside upper left", ncols=self._columns, borderpad=0)


@dataclass(frozen=True, slots=True)
class Cells(OverDepth):
    """A grid: a row for each series, a column for each block, darker for values nearer to `most`."""

    most: float = 1.0

    @property
    def height(self) -> float:
        return 26 * len(self.series) + 48

    def paint(self, canvas: Canvas) -> None:
        axes = canvas.figure.subplots()
        has_room = self.num_blocks <= 8
        for row, each in enumerate(self.series):
            for mark in each.marks:
                depth = 0.12 + 0.78 * min(max(mark.y / self.most, 0.0), 1.0)
                (cell,) = axes.barh(row, 0.94, 0.92, mark.x - 0.47, color=color(0), alpha=depth)
                canvas.tip(cell, mark.title)
                if has_room:
                    figures = f"{mark.y:.3f}".rstrip("0").rstrip(".")
                    axes.text(mark.x, row, figures, ha="center", va="center_baseline", fontsize=11)
        axes.set_yticks(
            range(len(self.series)), [printable(each.name).rpartition(".")[2][-18:] for each in self.series]
        )
        axes.set_ylim(len(self.series) - 0.5, -0.5)
        self.label_blocks(axes)
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)


@dataclass(frozen=True, slots=True)
class Scatter(Figure):
    """Named marks `(place, name, dominated)` and a stepped line through those that are not dominated."""

    marks: Sequence[tuple[Mark, str, bool]]
    x_label: str
    height = 280

    @property
    def head(self) -> tuple[str, ...]:
        return "checkpoint", self.x_label, self.title

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [(name, short(mark.x), short(mark.y)) for mark, name, _ in self.marks]

    def paint(self, canvas: Canvas) -> None:
        axes = canvas.figure.subplots()
        best = sorted((mark.x, mark.y) for mark, _, dominated in self.marks if not dominated)
        axes.step(*zip(*best, strict=True), where="post", color=color(0), alpha=0.6, linewidth=1.5, linestyle="--")
        # Dominated ones first: the others are drawn over them.
        for mark, _, dominated in sorted(self.marks, key=lambda each: not each[2]):
            fill = COLORS["soft"] if dominated else color(0)
            (dot,) = axes.plot(mark.x, mark.y, "o", color=fill, markersize=10, zorder=4)
            canvas.tip(dot, mark.title)
        axes.margins(0.16)
        if _is_log([mark.x for mark, _, _ in self.marks]):
            axes.set_xscale("log")
        use_short_numbers(axes, short, is_log=_is_log([mark.y for mark, _, _ in self.marks]))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.set_xlabel(self.x_label, loc="right")
        canvas.figure.draw_without_rendering()
        self._write_names(axes)

    def _write_names(self, axes: Axes) -> None:
        """Names next to marks: left of the frontier there are none, right of it only dominated ones. Names make room
        for each other, away from the frontier."""
        taken: list[tuple[float, float, float]] = []
        extent = axes.get_window_extent()
        for mark, name, dominated in sorted(self.marks, key=lambda each: each[0].y):
            x, y = axes.transData.transform((mark.x, mark.y))
            shown = _fitted(name)
            room = 7.2 * len(shown)
            leftwards = x - 9 - room > extent.x0 if not dominated else x + 9 + room > extent.x1
            start = x - 9 - room if leftwards else x + 9
            beside = [other for begin, end, other in taken if start < end and begin < start + room]
            at = _free(y - 4, beside, 2 if dominated else -2, (extent.y0 + 2, extent.y1 - 8))
            taken.append((start, start + room, at))
            axes.annotate(
                shown,
                (mark.x, mark.y),
                (-9 if leftwards else 9, at - y),
                textcoords="offset points",
                ha="right" if leftwards else "left",
                bbox={"facecolor": COLORS["card"], "edgecolor": "none", "pad": 0.5},
            )


def _free(y: float, taken: Sequence[float], step: float, bounds: tuple[float, float]) -> float:
    """The first height from `y` on in steps of `step`, else the other way, within bounds and 14 pixels from others."""
    ways = [y + sign * step * number for sign in (1, -1) for number in range(150)]
    inside = [way for way in ways if bounds[0] <= way <= bounds[1]]
    return next((way for way in inside if all(abs(way - other) >= 14 for other in taken)), y)


def _is_log(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > _LOG_FROM


def _color(index: int) -> str:
    return COLORS["base"] if index == MUTED else color(index)


def _fitted(name: str) -> str:
    """A name of at most 26 characters."""
    shown = printable(name)
    return shown if len(shown) <= _NAME else f"{shown[: _NAME - 1]}…"
