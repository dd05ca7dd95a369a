"""Report of a simulation: a table over policies, what to choose, and JSON. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from compress.common.cli import wide_console
from runtime.bench.figures import MEANINGS, Objective
from runtime.simulate.policy import Setup
from runtime.simulate.run import Outcome

SCHEMA = 1
CLOSE = 1.03
"""Ratio of goodput below which the simpler policy is chosen: that of the rates between which a search ends."""
COLUMNS = ("rate", "goodput", "good", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "tokens/s", "busy")


@dataclass(frozen=True, slots=True)
class Report:
    """Outcomes of policies, in the order of the registry.

    Attributes:
        command: as typed.
        rate: average requests per second of a trace file, before they are scaled; None without a file.
        left_out: reasons why policies were not run, by name.
    """

    command: str
    setup: Setup
    objectives: tuple[Objective, ...]
    outcomes: Sequence[Outcome]
    rate: float | None
    left_out: dict[str, str]

    @property
    def choice(self) -> Outcome:
        """The policy with the highest goodput; of those that are close, the first."""
        best = max(each.goodput for each in self.outcomes)
        return next(each for each in self.outcomes if each.goodput * CLOSE >= best)

    def as_json(self) -> dict[str, Any]:
        """Returns the report. Keys are stable and name their unit; new ones may be added."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "costs": {name: getattr(self.setup.costs, name) for name in ("model", "machine", "date", "error")},
            "devices": self.setup.num_devices,
            "objectives": {each.metric: each.seconds for each in self.objectives},
            "trace_requests_per_s": self.rate,
            "outcomes": [{**asdict(each), "goodput_requests_per_s": each.goodput} for each in self.outcomes],
            "left_out": self.left_out,
            "choice": self.choice.policy,
            "meanings": MEANINGS,
        }

    def show(self) -> None:
        """Prints the table and what to choose."""
        console, setup = wide_console(), self.setup
        title = f"{setup.costs.model} on {setup.num_devices} x {setup.costs.machine}"
        table = Table(title=title, title_justify="left")
        table.add_column("policy", no_wrap=True)
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for outcome in self.outcomes:
            table.add_row(outcome.policy, *_cells(outcome))
        console.print(table)
        for line in self.lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def lines(self) -> list[str]:
        """Returns what the table does not say, one line each."""
        costs, limits = self.setup.costs, ", ".join(f"{each.metric} {each.seconds:g} s" for each in self.objectives)
        lines = [
            "rate and goodput: requests/s; good: share within all limits; times in ms; tokens/s: output",
            f"limits      {limits}",
            *([f"arrivals    scaled from the {self.rate:.2f} requests/s of the file"] if self.rate else []),
            f"costs       measured {costs.date}, median difference of the model {costs.error:.1%}",
            *(f"preempted   {each.policy}: {each.preemptions} times" for each in self.outcomes if each.preemptions),
            *(f"left out    {name}: {reason}" for name, reason in self.left_out.items()),
        ]
        failed = {outcome.figures.failed for outcome in self.outcomes}
        if any(failed):
            lines.append(f"refused     {max(failed)} requests, longer than the context or the KV cache")
        return [*lines, f"choose      {self.choice.policy}: {self.choice.goodput:.1f} requests/s within the limits"]


def _cells(outcome: Outcome) -> list[str]:
    figures = outcome.figures
    times = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99")]
    latencies = [(figures.latency_ms[metric], name) for metric, name in times]
    return [
        f"{outcome.rate:,.1f}",
        f"{outcome.goodput:,.1f}",
        f"{outcome.good_share:.0%}",
        *(f"{getattr(each, name):,.1f}" if each else "-" for each, name in latencies),
        f"{figures.output_tokens_per_s:,.0f}",
        f"{outcome.utilization:.0%}",
    ]
