"""Latency: the first token with and without the prefix cache, and the next token while a long prompt arrives.

Both run the engine in this process, step by step, and interleave the two sides, so that other work on the machine
affects both alike.

    python scripts/bench_serve.py latency
    python scripts/bench_serve.py latency --model packed/ --prefix 1024 --long 1536
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarking.contenders import Job, mixed_jobs
from benchmarking.machine import open_console
from benchmarking.tables import Row, print_with_markdown
from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.llm import load_engine

DECODING = 8
"""Sequences that decode while long prompts arrive."""


def first_token_seconds(engine: Engine, prompt: Sequence[int]) -> float:
    """From adding a request to its first token; the engine has nothing else to do."""
    start = time.perf_counter()
    engine.add_request(prompt, SamplingParams(1, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def prefix_rows(model: Path, system: Sequence[int], questions: Sequence[Job]) -> list[Row]:
    """Time to first token of questions that follow one long system prompt."""
    cached, _ = load_engine(model, RuntimeConfig())
    plain, _ = load_engine(model, RuntimeConfig(prefix_caching=False))
    for engine in (cached, plain):
        first_token_seconds(engine, [*system, 1])
    pairs = [
        tuple(first_token_seconds(engine, [*system, *question.prompt]) for engine in (cached, plain))
        for question in questions
    ]
    with_cache, without = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(slow / quick for quick, slow in pairs)
    shape = f"{len(system)} + {len(questions[0].prompt)} to {len(questions[-1].prompt)} tokens"
    return [
        {
            "prompt": shape,
            "requests": str(len(pairs)),
            "cache on, ms": f"{1e3 * with_cache:.1f}",
            "cache off, ms": f"{1e3 * without:.1f}",
            "ratio (median of pairs)": f"{ratio:.2f}",
        }
    ]


def inter_token_seconds(engine: Engine, prompts: Sequence[Sequence[int]], long_prompt: Sequence[int]) -> list[float]:
    """Waits between tokens of `DECODING` sequences, while one long prompt after the other arrives."""
    room = engine.runner.max_model_len - max(map(len, prompts)) - 1
    ids = [engine.add_request(p, SamplingParams(room, temperature=0, ignore_eos=True)) for p in prompts]
    waits: list[float] = []
    last: dict[str, float] = {}
    for step in itertools.count():
        if step in (20, 60, 100):
            engine.add_request([step, *long_prompt], SamplingParams(1, temperature=0, ignore_eos=True))
        if step == 160:
            break
        for delta in engine.step():
            if delta.request_id in ids:
                now = time.perf_counter()
                if delta.request_id in last:
                    waits.append(now - last[delta.request_id])
                last[delta.request_id] = now
    engine.abort_all()
    return waits


def chunking_rows(model: Path, prompts: list[tuple[int, ...]], long_prompt: Sequence[int], rounds: int) -> list[Row]:
    """p50, p99 and the longest wait, with chunks and with whole prompts in one step."""
    whole = len(long_prompt) + 64
    configs = {
        "chunks of 256 (default)": RuntimeConfig(prefix_caching=False),
        "chunks of 64": RuntimeConfig(prefix_caching=False, prefill_chunk=64),
        "whole prompts": RuntimeConfig(prefix_caching=False, prefill_chunk=whole, max_num_batched_tokens=whole),
    }
    engines = {name: load_engine(model, config)[0] for name, config in configs.items()}
    waits: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            waits[name] += inter_token_seconds(engine, prompts, long_prompt)
    base = _percentile(waits["whole prompts"], 99)
    return [
        {
            "prefill": name,
            "tokens": str(len(found)),
            "p50, ms": f"{1e3 * _percentile(found, 50):.1f}",
            "p99, ms": f"{1e3 * _percentile(found, 99):.1f}",
            "longest, ms": f"{1e3 * max(found):.1f}",
            "p99 of whole / p99": f"{base / _percentile(found, 99):.2f}",
        }
        for name, found in waits.items()
    ]


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of the shared system prompt")
    parser.add_argument("--long", type=int, default=1536, help="tokens of the long prompt that arrives")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> int:
    console = open_console()
    system = mixed_jobs(options.model, 1, options.prefix, options.prefix)[0].prompt
    questions = sorted(mixed_jobs(options.model, options.questions, 16, 64, seed=1), key=lambda job: len(job.prompt))
    tables = {"Time to first token after a shared prefix": prefix_rows(options.model, system, questions)}
    prompts = [job.prompt for job in mixed_jobs(options.model, DECODING, 32, 64, seed=2)]
    long_prompt = mixed_jobs(options.model, 1, options.long, options.long, seed=3)[0].prompt
    title = f"Wait between tokens of {DECODING} sequences while prompts of {options.long} tokens arrive"
    tables[title] = chunking_rows(options.model, prompts, long_prompt, options.rounds)
    for title, table in tables.items():
        print_with_markdown(title, table, console)
    return 0
