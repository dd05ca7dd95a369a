"""Compares `runtime simulate` with AISimulate, the simulator of NVIDIA Dynamo, on one trace.

    pip install --no-deps --target DIR ai-dynamo-runtime==1.6.1
    PYTHONPATH=.:DIR python scripts/compare_aisimulate.py [--num-prompts 1000] [--request-rate 30]

Both serve the same requests by one engine of the same limits, whose step takes a fixed time for prompts, if it has any,
and one for decodes: what differs is the scheduling. The wheel contains AISimulate in compiled form.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from typing import Any

from runtime.bench.figures import Figures
from runtime.core.config import RuntimeConfig
from runtime.core.step import StepPlan
from runtime.simulate.costs import read_costs
from runtime.simulate.jobs import TRACES, Job, Workload, at_rate, make_jobs
from runtime.simulate.policies.together import Chunked
from runtime.simulate.policy import Setup
from runtime.simulate.run import simulate
from runtime.simulate.worker import VirtualRunner, Worker

PREFILL_MS, DECODE_MS = 5.0, 1.0
SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 16, "num_gpu_blocks": 8192}


class FixedRunner(VirtualRunner):
    def seconds_of(self, plan: StepPlan) -> float:
        lengths = [entry.num_tokens for entry in plan.entries]
        return 1e-3 * (PREFILL_MS * (max(lengths) > 1) + DECODE_MS * (min(lengths) == 1))


class Fixed(Chunked):
    def build(self) -> list[Worker]:
        runner = FixedRunner(self.setup.costs, SIZES["num_gpu_blocks"], self.setup.costs.max_model_len)
        return [Worker(self.events, runner, self.config(), self.receive)]


def ours(jobs: list[Job], rate: float) -> Figures:
    tokens = SIZES["max_num_batched_tokens"]
    config = RuntimeConfig(
        max_num_seqs=SIZES["max_num_seqs"],
        max_num_batched_tokens=tokens,
        prefill_chunk=tokens,
        max_itl_ms=0,
        prefix_caching=False,
    )
    return simulate(Fixed, Setup(replace(read_costs("demo"), request=0.0), config), jobs, rate, ()).figures


def theirs(jobs: list[Job]) -> dict[str, Any]:
    from dynamo._core import run_mocker_trace_replay

    timing = {"type": "fixed", "prefill_ms": PREFILL_MS, "decode_ms": DECODE_MS}
    limits = {**SIZES, "enable_prefix_caching": False, "enable_chunked_prefill": True, "timing_model": timing}
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for number, job in enumerate(jobs):
            lengths = {"input_length": job.prompt_tokens, "output_length": job.output_tokens}
            print(json.dumps({"timestamp": job.at * 1000, **lengths, "hash_ids": [number]}), file=file, flush=True)
        result = run_mocker_trace_replay([file.name], extra_engine_args={"engine": limits}, trace_block_size=2048)
    return dict(result.summary() if callable(result.summary) else result.summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--request-rate", type=float, default=30.0)
    options = parser.parse_args()
    trace = TRACES["azure-conversation"]
    workload = Workload(trace.input, trace.output, options.num_prompts, burstiness=trace.burstiness, scale=0.1)
    jobs = at_rate(make_jobs(workload), options.request_rate)
    own, other = ours(jobs, options.request_rate), theirs(jobs)
    rows = {"output tokens/s": (own.output_tokens_per_s, other["output_throughput_tok_s"])}
    for metric in ("ttft", "itl", "tpot"):
        latency = own.latency_ms[metric]
        rows[f"{metric} mean, ms"] = (latency.mean if latency else 0.0, other[f"mean_{metric}_ms"])
        rows[f"{metric} p99, ms"] = (latency.p99 if latency else 0.0, other[f"p99_{metric}_ms"])
    print(f"{'':20}{'simulate':>10}{'AISimulate':>12}{'difference':>12}")
    for name, (mine, their) in rows.items():
        print(f"{name:20}{mine:10.2f}{their:12.2f}{mine / their - 1:12.1%}")


if __name__ == "__main__":
    main()
