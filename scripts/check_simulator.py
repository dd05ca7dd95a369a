"""Compares `runtime simulate` with a server: the same requests over HTTP, and in virtual time over costs measured just
before and just after.

    OMP_NUM_THREADS=1 python scripts/check_simulator.py [MODEL] [--request-rate 10] [--num-prompts 200]

Prints throughput and latencies of both, and exits with status 1 if the median of the rounds of one differs by more than
`--within`. The machine should be idle: the server, its client and the measurement take turns on the same cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from compress.common.cli import demo_model_path
from runtime.bench.figures import Figures, Run
from runtime.bench.load import Lengths, Load, Workload
from runtime.bench.run import Plan, run, run_server
from runtime.core.config import RuntimeConfig
from runtime.simulate.costs import MeasuredCosts
from runtime.simulate.jobs import Job, native_rate
from runtime.simulate.measure import measure
from runtime.simulate.policies.together import Chunked
from runtime.simulate.policy import Setup
from runtime.simulate.run import simulate

METRICS = (("ttft", "p50"), ("itl", "p50"), ("itl", "mean"), ("tpot", "p50"), ("e2e", "p50"))


def measured(model: Path) -> MeasuredCosts:
    return measure(model, RuntimeConfig(prefix_caching=False, overlap=False), str(model), "")


def simulated(costs: MeasuredCosts, jobs: list[Job]) -> Figures:
    sizes = {"max_num_batched_tokens": costs.max_num_batched_tokens, "prefill_chunk": costs.prefill_chunk}
    config = RuntimeConfig(max_itl_ms=None, prefix_caching=False, **sizes)
    return simulate(Chunked, Setup(costs, config), jobs, native_rate(jobs), ()).figures


def values(figures: Figures) -> dict[str, float]:
    """Figures to compare, by name."""
    found = {"output tokens/s": figures.output_tokens_per_s}
    for metric, name in METRICS:
        latency = figures.latency_ms[metric]
        found[f"{metric} {name}, ms"] = getattr(latency, name) if latency else 0.0
    return found


def compare(served: Run, before: MeasuredCosts, after: MeasuredCosts) -> dict[str, tuple[float, float]]:
    """Pairs what the server took, by figure, with the mean of two simulations of its requests."""
    jobs = [
        Job(str(number), record.start, record.prompt_tokens, record.output_tokens)
        for number, record in enumerate(sorted(served.records, key=lambda record: record.start))
    ]
    first, last = (values(simulated(costs, jobs)) for costs in (before, after))
    return {name: (real, (first[name] + last[name]) / 2) for name, real in values(served.figures).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=demo_model_path())
    parser.add_argument("--request-rate", type=float, default=10.0)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1, help="servers between measurements; medians are compared")
    parser.add_argument("--within", type=float, default=0.15, help="relative difference that is allowed")
    options = parser.parse_args()
    workload = Workload(Lengths(32, 256), Lengths(32, 256), options.num_prompts)
    plan = Plan("", workload, Load(rate=options.request_rate), tokenizer_path=options.model)
    costs, rounds = [measured(options.model)], []
    for _ in range(options.rounds):
        with run_server(options.model) as server:
            served = run(plan, server.url)
        costs.append(measured(options.model))
        rounds.append(compare(served, *costs[-2:]))
    worst = 0.0
    print(f"{'':20}{'server':>10}{'simulated':>11}{'difference':>12}{'of rounds':>20}")
    for name in rounds[0]:
        real, found = (median(pairs[name][side] for pairs in rounds) for side in (0, 1))
        each = [pairs[name][1] / pairs[name][0] - 1 for pairs in rounds]
        middle = median(each)
        worst = max(worst, abs(middle))
        print(f"{name:20}{real:10.2f}{found:11.2f}{middle:12.1%}{f'{min(each):.1%} to {max(each):.1%}':>20}")
    print("median differences of the costs: " + ", ".join(f"{each.error:.1%}" for each in costs))
    return int(worst > options.within)


if __name__ == "__main__":
    sys.exit(main())
