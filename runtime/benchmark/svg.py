"""A small SVG writer: panels with axes, curves, areas and marks. Numbers in, text out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, SOFT, GRID, ACCENT, FILL = "#1f2937", "#6b7280", "#e5e7eb", "#2563eb", "#dbeafe"
FONT = "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\""
STEPS = (1, 2, 5, 10)
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels, linear or logarithmic.

    Attributes:
        low, high: values at the ends; `high > low`, and both above 0 if `is_log`.
        start, end: pixels at the ends.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, self.low)), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values between the ends: four to six of them, or 1, 2, 5, 10, ... on a logarithmic scale."""
        return self._decades() if self.is_log else self._even()

    def _decades(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = math.log10(self.high / self.low)
        steps = range(1, 10) if decades < 0.7 else STEPS[:3] if decades < 3 else STEPS[:1]
        return [s * 10.0**e for e in range(first, last + 1) for s in steps if self.low <= s * 10.0**e <= self.high]

    def _even(self) -> list[float]:
        rough = (self.high - self.low) / 6
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(s * unit for s in STEPS if s * unit >= rough * 0.999)
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + i * step for i in range(count + 1)]


@dataclass
class Panel:
    """One diagram. Its frame is `width` x `height` at (`left`, `top`); titles are above, axis labels around.

    Attributes:
        x, y: ranges `(low, high)`.
    """

    left: float
    top: float
    width: float
    height: float
    title: str
    subtitle: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str = ""
    is_log: bool = False
    is_share: bool = False
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.across = Scale(*self.x, self.left, self.left + self.width, self.is_log)
        self.up = Scale(*self.y, self.top + self.height, self.top)
        self._write_frame()

    def curve(self, points: Points, *, fill: bool = False) -> None:
        """A line through points, and the area under it if asked for."""
        path = " ".join(f"{self.across.place(x):.1f},{self.up.place(y):.1f}" for x, y in points)
        if fill:
            first, last, base = self.across.place(points[0][0]), self.across.place(points[-1][0]), self.up.start
            corners = f"{first:.1f},{base:.1f} {path} {last:.1f},{base:.1f}"
            self.parts.append(f'<polygon points="{corners}" fill="{FILL}"/>')
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{ACCENT}" stroke-width="1.8"/>')

    def mark(self, x: float, y: float) -> None:
        """A dot."""
        place = f'cx="{self.across.place(x):.1f}" cy="{self.up.place(y):.1f}"'
        self.parts.append(f'<circle {place} r="3.5" fill="{ACCENT}" stroke="white"/>')

    def notes(self, lines: Sequence[str]) -> None:
        """Short lines in the lower right corner, where a rising curve leaves room."""
        right, bottom = self.left + self.width - 4, self.top + self.height - 10
        for i, content in enumerate(reversed(lines)):
            self.parts.append(text(right, bottom - 16 * i, content, 11, INK, "end", halo=True))

    def _write_frame(self) -> None:
        right, bottom = self.left + self.width, self.top + self.height
        self.parts += [text(self.left, self.top - 26, self.title, 13, INK, weight=600)]
        self.parts += [text(self.left, self.top - 10, self.subtitle, 11, SOFT)]
        for value in self.up.ticks():
            y = self.up.place(value)
            self.parts.append(line(self.left, y, right, y, GRID))
            label = f"{value:.0%}" if self.is_share else number(value)
            self.parts.append(text(self.left - 8, y + 4, label, 11, SOFT, "end"))
        for value in self.across.ticks():
            x = self.across.place(value)
            self.parts.append(line(x, bottom, x, bottom + 4, SOFT))
            self.parts.append(text(x, bottom + 18, number(value), 11, SOFT, "middle"))
        self.parts.append(line(self.left, bottom, right, bottom, SOFT))
        self.parts.append(text(right, bottom + 34, self.x_label, 11, SOFT, "end"))


def number(value: float) -> str:
    """`0.5`, `12`, `1,500`."""
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"


def line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    """A straight line between two points in pixels."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def text(
    x: float,
    y: float,
    content: str,
    size: int,
    color: str,
    anchor: str = "start",
    *,
    weight: int = 400,
    halo: bool = False,
) -> str:
    """Text at its baseline; a halo keeps it readable on top of lines."""
    outline = ' stroke="white" stroke-width="3" paint-order="stroke"' if halo else ""
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"{outline}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def document(width: int, height: int, parts: Sequence[str]) -> str:
    """A whole SVG file on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join([f"{head} {FONT}>", f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])
