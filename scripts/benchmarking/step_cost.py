"""Cost of an engine step without the model: scheduler, blocks, outputs, text and metrics, with an instant runner.

Times are processor time of the one thread, so other work on the machine hardly counts.

    python scripts/bench_serve.py scheduler                       # 64 sequences that decode
    python scripts/bench_serve.py scheduler --sequences 256 --host-blocks 1000
    python scripts/bench_serve.py scheduler --clients 8           # that take turns
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

from rich.console import Console

from benchmarking.tables import Row, print_table
from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import RequestOptions, SamplingParams
from runtime.core.step import ComputedStep, Runner, SampledToken, StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.text.tokenizer import Tokenizer

PROMPT_TOKENS = 128
NEW_TOKENS = 512


class InstantRunner(Runner):
    """Runner whose steps return the same token at once; it notes their times."""

    max_model_len = 4096
    vocab_size = 8192

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.asked = self.answered = 0.0

    def submit(self, plan: StepPlan) -> ComputedStep:
        self.asked = time.thread_time()
        output = StepOutput({entry.sequence.id: [SampledToken(300)] for entry in plan.entries if entry.samples})
        self.answered = time.thread_time()
        return ComputedStep(output)


def step_milliseconds(engine: Engine, runner: InstantRunner) -> list[tuple[float, float]]:
    """Milliseconds before the runner is called and after it returns, for each step in which all sequences decode."""
    while engine.scheduler.waiting or len(engine.scheduler.decodes()) < len(engine.scheduler.running):
        engine.step()
    times = []
    times, full = [], len(engine.scheduler.running)
    while len(engine.scheduler.running) == full:
        start = time.thread_time()
        engine.step()
        times.append((1e3 * (runner.asked - start), 1e3 * (time.thread_time() - runner.answered)))
    return times


def measure(tokenizer: Tokenizer | None, sequences: int, host_blocks: int, clients: int) -> Row:
    config = RuntimeConfig(max_num_seqs=sequences, max_num_batched_tokens=max(512, sequences))
    runner = InstantRunner(sequences * (PROMPT_TOKENS + NEW_TOKENS) // config.block_size, host_blocks)
    engine = Engine(runner, tokenizer, config)
    for index in range(sequences):
        prompt = [index % runner.vocab_size, *range(PROMPT_TOKENS - 1)]
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=index)
        engine.add_request(prompt, sampling, options=RequestOptions(client=str(index % clients)))
    times = step_milliseconds(engine, runner)
    totals = [before + after for before, after in times]
    return {
        "text": "demo tokenizer" if tokenizer else "none",
        "sequences": str(sequences),
        "clients": str(clients),
        "steps": str(len(times)),
        "ms/step": f"{median(totals):.3f}",
        "least": f"{min(totals):.3f}",
        "p99": f"{quantiles(totals, n=100)[98]:.3f}",
        "to plan": f"{median(before for before, _ in times):.3f}",
        "to publish": f"{median(after for _, after in times):.3f}",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=64, help="sequences that decode together")
    parser.add_argument("--clients", type=int, default=1, help="clients that the sequences belong to")
    parser.add_argument("--host-blocks", type=int, default=0, help="pages that host memory holds")


def run(options: argparse.Namespace) -> int:
    tokenizer = Tokenizer.open(demo_model_path())
    rows = [measure(each, options.sequences, options.host_blocks, options.clients) for each in (None, tokenizer)]
    print_table("Milliseconds per step without the model", rows, Console())
    return 0
