"""The picture of a run: how latencies are distributed, and what the server did over time."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.benchmark.client import Record
from runtime.benchmark.figures import percentile
from runtime.benchmark.report import Run, facts
from runtime.benchmark.svg import INK, SOFT, Panel, Points, document, text

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
