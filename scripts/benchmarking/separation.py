"""Goodput of one engine with chunked prefill, of two engines, and of prefill and decode in separate engines.

All servers run all the time; each round measures one after the other, with the same requests at the same times. Servers
share the cores of this machine with the client.

    OMP_WAIT_POLICY=passive python scripts/bench_serve.py separation --rates 1 2 4 --slo ttft=1s,itl=100ms
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarking.machine import open_console
from benchmarking.tables import Row, print_with_markdown
from compress.common.cli import demo_model_path
from runtime.bench.figures import Figures, parse_objectives
from runtime.bench.load import Lengths, Load, Workload
from runtime.bench.run import Plan, run_server
from runtime.bench.run import run as run_plan

SERVERS: dict[str, Sequence[str]] = {
    "one engine": (),
    "two engines": ("--data-parallel-size", "2"),
    "prefill and decode apart": ("--prefill-engines", "1"),
}


def row(name: str, rate: float, found: Sequence[Figures]) -> Row:
    """Returns medians over rounds, and the range of goodput."""

    def middle(metric: str, percentile: str) -> str:
        values = [each.latency_ms[metric] for each in found]
        return f"{median(getattr(value, percentile) for value in values if value is not None):.0f}"

    shares = sorted(100 * each.goodput.share for each in found if each.goodput is not None)
    return {
        "server": name,
        "requests/s": f"{rate:g}",
        "goodput %": f"{median(shares):.0f}",
        "range": f"{shares[0]:.0f} to {shares[-1]:.0f}",
        "ttft p50 ms": middle("ttft", "p50"),
        "ttft p95": middle("ttft", "p95"),
        "itl p50 ms": middle("itl", "p50"),
        "itl p99": middle("itl", "p99"),
        "tpot p95 ms": middle("tpot", "p95"),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="requests per second")
    parser.add_argument("--requests", type=int, default=40, help="requests of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=Lengths.parse, default=Lengths(512, 1536), help="tokens of prompts")
    parser.add_argument("--output", type=Lengths.parse, default=Lengths(64, 64), help="tokens of answers")
    parser.add_argument("--slo", default="ttft=1s,itl=100ms", help="limits of goodput, as of runtime bench")


def run(options: argparse.Namespace) -> int:
    console = open_console()
    rows: list[Row] = []
    with ExitStack() as stack:
        starts = {name: run_server(options.model, serve) for name, serve in SERVERS.items()}
        urls = {name: stack.enter_context(start).url for name, start in starts.items()}
        for rate in options.rates:
            found: dict[str, list[Figures]] = {name: [] for name in urls}
            for number in range(options.rounds):
                seed = number + 1000 * int(rate)
                workload = Workload(options.prompt, options.output, options.requests, seed=seed)
                load, objectives = Load(rate=rate), parse_objectives(options.slo)
                plan = Plan("", workload, load, tokenizer_path=options.model, objectives=objectives)
                for name, url in urls.items():
                    found[name].append(run_plan(plan, url).figures)
            rows += [row(name, rate, each) for name, each in found.items()]
    print_with_markdown(f"Goodput within {options.slo}", rows, console)
    return 0
