"""Plots of a run: distributions of latencies, and throughput and concurrency over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from compress.common.errors import ToolkitError
from compress.common.plots import COLORS, INSTALL_PLOTS, Canvas, color, draw_svg, has_matplotlib, svg_file
from runtime.bench.figures import Run, facts
from runtime.bench.load import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

WIDTH, HEIGHT = 1120, 690
MARKED = (50, 90, 99)
NUM_BINS = 60
MAX_STEPS = 250
"""Most steps of a cumulative distribution."""
Points = Sequence[tuple[float, float]]


def check_plots() -> None:
    """Raises ToolkitError where matplotlib is not installed, before a run whose plot could not be written."""
    if not has_matplotlib():
        raise ToolkitError("--plot draws with matplotlib, which is not installed", INSTALL_PLOTS)


def draw(run: Run) -> str:
    """Draws an SVG file: three latencies as cumulative shares, then output tokens per second and open requests."""
    return svg_file(draw_svg(lambda canvas: _paint(canvas, run), WIDTH, HEIGHT, f"{run.model}: {run.load}"))


def _paint(canvas: Canvas, run: Run) -> None:
    canvas.figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.1)
    (titles,), (upper,), (lower,) = canvas.figure.subfigures(3, 1, squeeze=False, height_ratios=(80, 300, 300))
    told = [_workload(run), "; ".join(fact.partition(" ")[2].strip() for fact in facts(run)[:2])]
    titles.text(0.01, 0.95, f"{run.model}: {run.load}", fontsize=18, weight="bold", va="top")
    titles.text(0.01, 0.5, "\n".join(told), color=COLORS["soft"], va="top", linespacing=1.5)
    complete = [record for record in run.records if record.is_complete]
    if complete:
        _paint_latencies(upper, complete)
        _paint_time_lines(lower, complete, run)


def _workload(run: Run) -> str:
    workload = run.workload
    prefix = f" after {workload.shared_prefix} shared ones" if workload.shared_prefix else ""
    lengths = f"{workload.input} prompt tokens{prefix}, {workload.output} output tokens"
    return f"{workload.num_requests} requests of {lengths}, temperature {workload.temperature:g}, seed {workload.seed}"


def _paint_latencies(figure: SubFigure, records: Sequence[Record]) -> None:
    gaps = [gap for record in records for gap in record.gaps] or [0.0]
    first, between, whole = figure.subplots(1, 3)
    _paint_latency(first, "Time to first token", "share of requests", [record.ttft for record in records])
    _paint_latency(between, "Between tokens", "share of gaps, all requests", gaps)
    _paint_latency(whole, "End to end", "share of requests", [record.e2e for record in records])


def _paint_latency(axes: Axes, title: str, subtitle: str, seconds: Sequence[float]) -> None:
    """Paints a cumulative distribution over milliseconds on a logarithmic scale."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [max(1e3 * value, 1e-3) for value in sorted(seconds)]
    low, high = values[0] / 1.15, values[-1] * 1.15
    stops = np.unique(np.ceil(np.arange(1, MAX_STEPS + 1) * len(values) / MAX_STEPS).astype(int))
    axes.step([low, *np.take(values, stops - 1), high], [0, *stops / len(values), 1], where="post", color=color(0))
    marked = np.percentile(values, MARKED).tolist()
    axes.plot(marked, [percent / 100 for percent in MARKED], "o", color=color(0))
    notes = [
        f"p{percent}  {value:,.{0 if value >= 100 else 1}f} ms" for percent, value in zip(MARKED, marked, strict=True)
    ]
    axes.text(0.98, 0.05, "\n".join(notes), ha="right", fontsize=11, transform=axes.transAxes)
    axes.set_xscale("log")
    axes.set(xlim=(low, high), ylim=(0, 1.03))
    decades = math.log10(high / low)
    steps = [float(step) for step in (range(1, 10) if decades < 0.7 else (1, 2, 5) if decades < 3 else (1,))]
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=8))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:.3g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    _name(axes, title, subtitle, "ms")


def _paint_time_lines(figure: SubFigure, records: Sequence[Record], run: Run) -> None:
    duration = run.figures.duration_s
    left, right = figure.subplots(1, 2)
    subtitle = f"of complete requests, in {NUM_BINS} bins of {duration / NUM_BINS:.2g} s"
    _paint_area(left, tokens_over_time(records, duration), duration)
    _name(left, "Output tokens per second", subtitle, "seconds")
    _paint_area(right, active_over_time(run.records), duration)
    _name(right, "Open requests", "sent and not ended, as the clients see it", "seconds")


def _paint_area(axes: Axes, points: Points, duration: float) -> None:
    xs, ys = zip(*points, strict=True)
    axes.fill_between(xs, ys, color=color(0), alpha=0.15, linewidth=0)
    axes.plot(xs, ys, color=color(0))
    axes.set(xlim=(0, duration), ylim=(0, max(ys) * 1.15 or 1.0))


def _name(axes: Axes, title: str, subtitle: str, x_label: str) -> None:
    axes.set_title(f"{title}\n", loc="left", fontsize=13, weight="bold")
    axes.text(0, 1.04, subtitle, color=COLORS["soft"], fontsize=11, transform=axes.transAxes)
    axes.set_xlabel(x_label, loc="right")


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
    """`(seconds, open requests)` as steps."""
    begin = min(record.start for record in records)
    changes = sorted([(r.start - begin, 1) for r in records] + [(r.end - begin, -1) for r in records])
    points, count = [(0.0, 0)], 0
    for at, change in changes:
        points += [(at, count), (at, count + change)]
        count += change
    return points
