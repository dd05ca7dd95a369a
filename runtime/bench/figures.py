"""Metrics of a benchmark: percentiles, throughput, goodput; defined in `MEANINGS`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from compress.common.cli import wide_console
from compress.common.errors import ToolkitError
from runtime.bench.load import Record, Workload

MEANINGS = {
    "ttft": "time to first token: from sending (open loop: from the due time) to the first text, connecting included",
    "itl": "inter-token latency: every gap between one piece of streamed text and the next, all requests together; a "
    "piece is what one step of the engine brought, several tokens when drafts were accepted",
    "tpot": "time per output token: of each request, (last text - first text) / (output tokens - 1)",
    "e2e": "end to end: from sending (open loop: from when it was due) to the end of the answer",
}
PERCENTILES = (50, 90, 95, 99)
TOO_MANY_REQUESTS = 429
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        """Computes them; None without values."""
        values = [1e3 * value for value in seconds]
        return cls(fmean(values), *np.percentile(values, PERCENTILES).tolist()) if values else None


LATENCIES: dict[str, Callable[[Record], Sequence[float]]] = {
    "ttft": lambda record: [record.ttft],
    "itl": lambda record: record.gaps,
    "tpot": lambda record: [] if record.tpot is None else [record.tpot],
    "e2e": lambda record: [record.e2e],
}
"""Seconds of one complete request, by the names in `MEANINGS`."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit that a request keeps or exceeds: `ttft`, `e2e`, `tpot`, or `itl` (its longest gap)."""

    metric: str
    seconds: float

    def is_met(self, record: Record) -> bool:
        """Returns whether a complete request meets the bound."""
        return max(LATENCIES[self.metric](record), default=0.0) <= self.seconds


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Parses `ttft=500ms,itl=50ms,e2e=10s`. Raises ToolkitError for anything else."""
    objectives = []
    for part in text.split(","):
        metric, _, bound = part.strip().partition("=")
        match = DURATION.fullmatch(bound)
        if metric not in MEANINGS or not match:
            names = ", ".join(MEANINGS)
            raise ToolkitError(f"{part!r} is not an objective", f"Write --slo ttft=500ms,e2e=10s with any of {names}")
        objectives.append(Objective(metric, float(match[1]) * (1e-3 if match[2] == "ms" else 1)))
    return tuple(objectives)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Counts the requests that achieve every objective; failed requests achieve none."""

    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Metrics of one run. Rates are per second from the first start to the last end.

    Attributes:
        complete, refused, failed: requests answered, refused with 429, and failed in any other way; `errors` says how.
        input_tokens, cached_tokens, output_tokens: of the complete ones; cached are prompt tokens that were not
            computed again.
        pieces: chunks of output, one per step and request; fewer than tokens if draft tokens were accepted.
        latency_ms: by the names in `MEANINGS`; None where nothing was complete.
    """

    duration_s: float
    complete: int
    refused: int
    failed: int
    errors: dict[str, int]
    peak_concurrency: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    pieces: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    latency_ms: dict[str, Distribution | None]
    goodput: Goodput | None


def summarize(records: Sequence[Record], peak_concurrency: int, objectives: Sequence[Objective] = ()) -> Figures:
    """Computes the metrics of a run with at least one request."""
    good = [record for record in records if record.is_complete]
    refused = sum(record.status == TOO_MANY_REQUESTS for record in records)
    duration = max(record.end for record in records) - min(record.start for record in records)
    tokens_in, tokens_out = (sum(getattr(r, name) for r in good) for name in ("prompt_tokens", "output_tokens"))
    return Figures(
        duration_s=duration,
        complete=len(good),
        refused=refused,
        failed=len(records) - len(good) - refused,
        errors=dict(Counter(record.error for record in records if record.error).most_common(10)),
        peak_concurrency=peak_concurrency,
        input_tokens=tokens_in,
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=tokens_out,
        pieces=sum(len(record.chunk_times) for record in good),
        requests_per_s=len(good) / duration,
        input_tokens_per_s=tokens_in / duration,
        output_tokens_per_s=tokens_out / duration,
        latency_ms={name: Distribution.of(chain.from_iterable(map(of, good))) for name, of in LATENCIES.items()},
        goodput=_goodput(records, objectives, duration) if objectives else None,
    )


def _goodput(records: Sequence[Record], objectives: Sequence[Objective], duration: float) -> Goodput:
    met = sum(r.is_complete and all(objective.is_met(r) for objective in objectives) for r in records)
    return Goodput(met / len(records), met / duration)


PACKAGES = ("torch", "tokenizers", "fastapi", "uvicorn", "llguidance")


def describe_machine() -> dict[str, Any]:
    """Describes processor, usable cores, memory, GPUs and operating system."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """Returns versions of Python and of the packages that determine speed, if installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def processor_name() -> str:
    """Returns the name that Linux reports, or the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return result.stdout.split("\n")[:-1] if result.returncode == 0 else []


SCHEMA = 1
LABELS = {"ttft": "first token", "itl": "between tokens", "tpot": "per output token", "e2e": "end to end"}


@dataclass(frozen=True, slots=True)
class Run:
    """Plan and results of a benchmark.

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
        """Returns the report. Keys are stable and name their unit; new ones may be added."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "url": self.url,
            "model": self.model,
            "load": self.load,
            "workload": asdict(self.workload),
            "objectives": {objective.metric: objective.seconds for objective in self.objectives},
            "figures": asdict(self.figures),
            "meanings": MEANINGS,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "requests": [_request_json(record) for record in self.records],
        }


def print_run(run: Run) -> None:
    """Prints latencies as a table, the rest as lines."""
    console = wide_console()
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
    """Returns everything except latencies, one line each."""
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
