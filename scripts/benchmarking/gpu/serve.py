"""A model of random codes over HTTP, by one client and by many: `runtime serve` under the load of `runtime bench`.

python scripts/bench_kernels.py gpu-serve --rows serve.jsonl
python scripts/bench_kernels.py gpu-serve --shape tiny --device cpu --load 2 4 8:16 4:8
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarking.gpu.models import prepare, room_for_models
from benchmarking.machine import Stopwatch, environment, in_own_process
from benchmarking.models import SHAPES
from benchmarking.tables import Rows

LOADS = (("1", "8", "128", "128"), ("64", "192", "128:512", "128:256"))
"""Clients, requests, tokens of a prompt, tokens of an answer."""


def measure(url: str, tokenizer: Path, load: list[str], rows: Rows) -> None:
    """Writes a row of the requests of one load."""
    from runtime.bench.load import Lengths, Load, Workload
    from runtime.bench.run import Plan
    from runtime.bench.run import run as run_plan

    clients, requests, prompt, answer = load
    workload = Workload(Lengths.parse(prompt), Lengths.parse(answer), int(requests))
    plan = Plan("", workload, Load(int(clients)), tokenizer_path=tokenizer, num_warm_up=int(clients))
    figures = asdict(run_plan(plan, url).figures)
    latencies = {
        f"{name}_{point}_ms": value
        for name in ("ttft", "itl")
        for point, value in (figures["latency_ms"][name] or {}).items()
    }
    counts = {name: figures[name] for name in ("complete", "failed", "errors", "output_tokens_per_s", "requests_per_s")}
    rows.add(what=f"{clients} clients, {prompt} + {answer} tokens", **counts, **latencies)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="8b-8k", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--form", default="int4", choices=("int4", "int8", "dense"))
    metavar = ("CLIENTS", "REQUESTS", "PROMPT", "ANSWER")
    parser.add_argument("--load", nargs=4, action="append", metavar=metavar, help="default: 1 client, then 64")
    parser.add_argument("--serve", nargs="*", default=(), metavar="OPTION", help="of `runtime serve`, without dashes")
    parser.add_argument("--rows", type=Path, help="append each figure here, as a line of JSON")


def run(options: argparse.Namespace) -> int:
    from runtime.bench.run import run_server

    rows = Rows(options.rows, shape=options.shape, form=options.form)
    rows.add(**in_own_process(environment))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that model and server go
    with tempfile.TemporaryDirectory(dir=room_for_models()) as work:
        folder = in_own_process(prepare, options.form, Path(work), options.shape, options.device)
        watch, given = Stopwatch(), [f"--{option}" for option in options.serve]
        with run_server(folder, ["--device", options.device, *given]) as server:
            rows.add(what="start", seconds=watch.read()[0], printed=server.printed)
            for load in options.load or LOADS:
                measure(server.url, folder, load, rows)
    return 0
