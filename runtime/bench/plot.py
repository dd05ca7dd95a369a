"""The picture of a run: how latencies are distributed, and what the server did over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from runtime.bench.figures import Run, facts, percentile
from runtime.bench.load import Record

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


WIDTH, HEIGHT = 1120, 690
TOP_ROW, BOTTOM_ROW = 150, 446
PANEL_HEIGHT = 180
MARKED = (50, 90, 99)
NUM_BINS = 60
MAX_STEPS = 250


def draw(run: Run) -> str:
    """An SVG file: three latencies as cumulative shares, then output tokens per second and requests under way."""
    figures = run.figures
    parts = [
        text(40, 38, f"{run.model}: {run.load}", 18, INK, weight=600),
        text(40, 60, _asked(run), 12, SOFT),
        text(40, 78, "; ".join(fact.partition(" ")[2].strip() for fact in facts(run)[:2]), 12, SOFT),
    ]
    good = [record for record in run.records if record.is_complete]
    if good:
        gaps = [gap for record in good for gap in record.gaps] or [0.0]
        parts += _latency(64, "Time to first token", "share of requests", [record.ttft for record in good])
        parts += _latency(428, "Between tokens", "share of gaps, all requests", gaps)
        parts += _latency(792, "End to end", "share of requests", [record.e2e for record in good])
        parts += _throughput(good, figures.duration_s)
        parts += _under_way(run.records, figures.duration_s)
    return document(WIDTH, HEIGHT, parts)


def _asked(run: Run) -> str:
    """The workload in words."""
    workload = run.workload
    prefix = f" after {workload.shared_prefix} shared ones" if workload.shared_prefix else ""
    lengths = f"{workload.input} prompt tokens{prefix}, {workload.output} output tokens"
    return f"{workload.num_requests} requests of {lengths}, temperature {workload.temperature:g}, seed {workload.seed}"


def _latency(left: float, title: str, subtitle: str, seconds: Sequence[float]) -> list[str]:
    """A cumulative distribution on a logarithmic scale of milliseconds."""
    values = [max(1e3 * value, 1e-3) for value in sorted(seconds)]
    low, high = values[0] / 1.15, values[-1] * 1.15
    panel = Panel(left, TOP_ROW, 290, PANEL_HEIGHT, title, subtitle, (low, high), (0, 1), "ms", True, True)
    panel.curve([(low, 0.0), *_steps(values), (high, 1.0)])
    marked = [percentile(values, percent) for percent in MARKED]
    for percent, value in zip(MARKED, marked, strict=True):
        panel.mark(value, percent / 100)
    panel.notes(
        [f"p{percent}  {value:,.{0 if value >= 100 else 1}f} ms" for percent, value in zip(MARKED, marked, strict=True)]
    )
    return panel.parts


def _steps(ordered: Sequence[float]) -> Points:
    """The share of values up to each value, or up to every so many of them: a picture shows no more."""
    count = len(ordered)
    points, before = [], 0
    for stop in sorted({-(-count * step // MAX_STEPS) for step in range(1, MAX_STEPS + 1)}):
        points += [(ordered[stop - 1], before / count), (ordered[stop - 1], stop / count)]
        before = stop
    return points


def _throughput(records: Sequence[Record], duration: float) -> list[str]:
    points = tokens_over_time(records, duration)
    top = max(rate for _, rate in points) * 1.15 or 1.0
    subtitle = f"of complete requests, in {NUM_BINS} bins of {duration / NUM_BINS:.2g} s"
    frame = (64, BOTTOM_ROW, 472, PANEL_HEIGHT, "Output tokens per second", subtitle)
    panel = Panel(*frame, (0, duration), (0, top), "seconds")
    panel.curve(points, fill=True)
    return panel.parts


def _under_way(records: Sequence[Record], duration: float) -> list[str]:
    points = active_over_time(records)
    top = max(count for _, count in points) * 1.15
    frame = (610, BOTTOM_ROW, 472, PANEL_HEIGHT, "Requests under way", "sent and not ended, as the clients see it")
    panel = Panel(*frame, (0, duration), (0, top), "seconds")
    panel.curve(points, fill=True)
    return panel.parts


def tokens_over_time(records: Sequence[Record], duration: float) -> Points:
    """`(seconds, output tokens per second)` in equal bins; an answer's tokens are spread evenly over its pieces."""
    begin, width = min(record.start for record in records), duration / NUM_BINS
    bins = [0.0] * NUM_BINS
    for record in records:
        for at in record.chunk_times:
            place = min(int((at - begin) / width), NUM_BINS - 1)
            bins[place] += record.output_tokens / len(record.chunk_times)
    return [((i + 0.5) * width, count / width) for i, count in enumerate(bins)]


def active_over_time(records: Sequence[Record]) -> Points:
    """`(seconds, requests under way)` as steps."""
    begin = min(record.start for record in records)
    changes = sorted([(r.start - begin, 1) for r in records] + [(r.end - begin, -1) for r in records])
    points, count = [(0.0, 0)], 0
    for at, change in changes:
        points += [(at, count), (at, count + change)]
        count += change
    return points
