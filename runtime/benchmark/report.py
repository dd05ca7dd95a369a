"""A run as JSON with stable keys, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.benchmark.client import Record
from runtime.benchmark.figures import MEANINGS, Figures, Objective
from runtime.benchmark.machine import describe_machine, describe_versions
from runtime.benchmark.workload import Workload

SCHEMA = 1
PLAIN_WIDTH = 120
LABELS = {"ttft": "first token", "itl": "between tokens", "tpot": "per output token", "e2e": "end to end"}


@dataclass(frozen=True, slots=True)
class Run:
    """What was done and what came of it.

    Attributes:
        load: `closed loop, concurrency 8` or `open loop, 4 requests/s`.
        command: as typed.
    """

    command: str
    url: str
    model: str
    load: str
    workload: Workload
    objectives: tuple[Objective, ...]
    records: Sequence[Record]
    figures: Figures

    def as_json(self) -> dict[str, Any]:
        """Keys stay; new ones may join. Seconds and milliseconds are named in the keys."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "url": self.url,
            "model": self.model,
            "load": self.load,
            "workload": asdict(self.workload),
            "objectives": {objective.metric: objective.seconds for objective in self.objectives},
            "figures": self.figures.as_json(),
            "meanings": MEANINGS,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "requests": [_request_json(record) for record in self.records],
        }


def print_run(run: Run) -> None:
    """Latencies as a table, the rest in lines."""
    console = Console()
    console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
    table = Table(title=f"{run.model} at {run.url}: {run.load}", title_justify="left")
    table.add_column("latency in ms")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for metric, values in run.figures.latency_ms.items():
        cells = [f"{value:,.1f}" for value in asdict(values).values()] if values else ["-"] * 5
        table.add_row(f"{LABELS[metric]} ({metric})", *cells)
    console.print(table)
    for line in facts(run):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def facts(run: Run) -> list[str]:
    """Everything that is not a latency, one line each."""
    figures = run.figures
    lines = [
        f"requests    {figures.complete} complete, {figures.refused} refused with 429, {figures.failed} failed "
        f"in {figures.duration_s:.2f} s; at most {figures.peak_concurrency} at a time",
        f"throughput  {figures.requests_per_s:.2f} requests/s, {figures.input_tokens_per_s:,.1f} input tokens/s, "
        f"{figures.output_tokens_per_s:,.1f} output tokens/s",
        f"tokens      {figures.input_tokens} in ({_share(figures)} from the prefix cache), {figures.output_tokens} out "
        f"in {figures.pieces} pieces",
    ]
    if figures.goodput:
        bounds = ", ".join(f"{objective.metric} {objective.seconds:g} s" for objective in run.objectives)
        lines.append(
            f"goodput     {figures.goodput.share:.1%} of the requests, {figures.goodput.requests_per_s:.2f} requests/s "
            f"within {bounds}"
        )
    return lines + [f"error       {count} x {error}" for error, count in figures.errors.items()]


def _share(figures: Figures) -> str:
    return f"{figures.cached_tokens / figures.input_tokens:.0%}" if figures.input_tokens else "0%"


def _request_json(record: Record) -> dict[str, Any]:
    has_text = record.is_complete and record.chunk_times
    return {
        "start_s": round(record.start, 6),
        "end_s": round(record.end, 6),
        "ttft_s": round(record.ttft, 6) if has_text else None,
        "longest_gap_s": round(max(record.gaps, default=0.0), 6),
        "chunks": len(record.chunk_times),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "status": record.status,
        "error": record.error,
    }
