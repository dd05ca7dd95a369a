"""Compares `runtime simulate` with a server: the same requests over HTTP, and in virtual time over costs measured just
before and just after.

    OMP_NUM_THREADS=1 python scripts/check_simulator.py [MODEL] [--request-rate 10] [--num-prompts 200]

Prints throughput and latencies of both, and exits with status 1 if one differs by more than `--within`. The machine
should be idle: the server, its client and the measurement take turns on the same cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compress.common.cli import demo_model_path
from runtime.bench.figures import Figures
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=demo_model_path())
    parser.add_argument("--request-rate", type=float, default=10.0)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--within", type=float, default=0.15, help="relative difference that is allowed")
    options = parser.parse_args()
    before = measured(options.model)
    workload = Workload(Lengths(32, 256), Lengths(32, 256), options.num_prompts)
    plan = Plan("", workload, Load(rate=options.request_rate), tokenizer_path=options.model)
    with run_server(options.model) as server:
        served = run(plan, server.url)
    after = measured(options.model)
    jobs = [
        Job(str(number), record.start, record.prompt_tokens, record.output_tokens)
        for number, record in enumerate(sorted(served.records, key=lambda record: record.start))
    ]
    first, last = (values(simulated(costs, jobs)) for costs in (before, after))
    worst = 0.0
    print(f"{'':20}{'server':>10}{'simulated':>11}{'before':>10}{'after':>10}{'difference':>12}")
    for name, real in values(served.figures).items():
        mean = (first[name] + last[name]) / 2
        worst = max(worst, abs(mean / real - 1))
        print(f"{name:20}{real:10.2f}{mean:11.2f}{first[name]:10.2f}{last[name]:10.2f}{mean / real - 1:12.1%}")
    print(f"median differences of the costs: {before.error:.1%} before, {after.error:.1%} after")
    return int(worst > options.within)


if __name__ == "__main__":
    sys.exit(main())
