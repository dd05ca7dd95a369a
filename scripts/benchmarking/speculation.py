"""Speculative decoding: acceptance and tokens per second of every drafter, compared with the engine without drafts.

Every drafter is measured twice: always drafting, and as it ships, with the gate that switches drafting off when it does
not raise throughput. Prompts are cut from the Python manual. All contenders answer the same prompts in turn, for
several rounds, so that other work on the machine affects all alike; ratios are medians over the rounds.

    python scripts/bench_serve.py speculation
    python scripts/bench_serve.py speculation --dtype float32 --batch 1 --drafters demo ngram
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarking.contenders import mixed_jobs
from benchmarking.machine import open_console
from benchmarking.tables import Row, print_with_markdown
from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.core.step import StepPlan
from runtime.engine.engine import Engine
from runtime.llm import load_engine
from runtime.speculative.proposer import Speculator

DRAFTERS = ("demo", "ngram", "ngram-tree", "self:2bit", "self:3bit", "self:skip=1", "self:skip")
TEMPERATURES = (0.0, 0.8)
Prompts = Sequence[Sequence[int]]


class CountingSpeculator(Speculator):
    """Also counts how many sequences had a draft verified, over all steps."""

    num_verified = 0

    def note(self, plan: StepPlan, num_accepted: Mapping[str, int]) -> None:
        self.num_verified += sum(entry.num_draft_tokens > 0 for entry in plan.entries)
        super().note(plan, num_accepted)


@dataclass
class Contender:
    """One engine and the tokens per second of each round."""

    name: str
    engine: Engine
    rates: list[float] = field(default_factory=list)

    def answer(self, prompts: Prompts, sampling: SamplingParams) -> None:
        """One round: all prompts together, prefill included."""
        start = time.perf_counter()
        for prompt in prompts:
            self.engine.add_request(prompt, sampling)
        while self.engine.has_work:
            self.engine.step()
        self.rates.append(len(prompts) * sampling.max_tokens / (time.perf_counter() - start))

    def figures(self, plain: Contender) -> dict[str, str]:
        """Acceptance, mean accepted draft tokens per verified draft, and speed relative to `plain`, by round."""
        metrics, speculator = self.engine.metrics, self.engine.speculator
        drafted = metrics.spec_decode_num_draft_tokens_total
        accepted = metrics.spec_decode_num_accepted_tokens_total
        verified = speculator.num_verified if isinstance(speculator, CountingSpeculator) else 0
        ratios = [mine / theirs for mine, theirs in zip(self.rates, plain.rates, strict=True)]
        return {
            "accepted": f"{accepted / drafted:.0%}" if drafted else "-",
            "per draft": f"{accepted / verified:.2f}" if verified else "-",
            "tokens/s": f"{statistics.median(self.rates):.0f}",
            "ratio": f"{statistics.median(ratios):.2f}",
        }


def make_contender(model: Path, config: RuntimeConfig, *, gated: bool) -> Contender:
    engine, _ = load_engine(model, config)
    if engine.speculator is not None:
        gate = engine.speculator.gate if gated else None
        engine.speculator = CountingSpeculator(engine.speculator.drafter, config.num_speculative_tokens, gate)
    return Contender(f"{config.speculative_model or 'none'}{', gated' if gated else ''}", engine)


def measure(
    model: Path, config: RuntimeConfig, drafters: Sequence[str], prompts: Prompts, sampling: SamplingParams, rounds: int
) -> list[Row]:
    """A row per drafter; the first round warms up and does not count, except in what gates have learned."""
    plain = make_contender(model, config, gated=False)
    contenders = [plain]
    for drafter in drafters:
        wish = replace(config, speculative_model=drafter)
        contenders += [make_contender(model, wish, gated=gated) for gated in (False, True)]
    for number in range(rounds + 1):
        for contender in contenders:
            contender.answer(prompts, sampling)
            if number == 0:
                contender.rates.clear()
    rows = [{"drafter": contender.name} | contender.figures(plain) for contender in contenders]
    with_gate = [rows[0], *rows[2::2]]
    return [
        {**always, "ratio with gate": gated["ratio"]}
        for always, gated in zip([rows[0], *rows[1::2]], with_gate, strict=True)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=192, help="tokens that each prompt is answered with")
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> int:
    console = open_console()
    count = options.num_speculative_tokens
    config = RuntimeConfig(dtype=options.dtype, num_speculative_tokens=count, prefix_caching=False)
    for batch in options.batch:
        jobs = mixed_jobs(options.model, batch, options.prompt, options.prompt)
        for temperature in TEMPERATURES:
            sampling = SamplingParams(options.tokens, temperature=temperature, seed=1, ignore_eos=True)
            prompts = [job.prompt for job in jobs]
            rows = measure(options.model, config, options.drafters, prompts, sampling, options.rounds)
            title = f"Batch {batch}, {'greedy' if not temperature else f'T = {temperature}'}"
            print_with_markdown(title, rows, console)
    return 0
