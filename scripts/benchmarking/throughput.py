"""Throughput of the engine compared with transformers: the same prompts, the same numbers of tokens, greedy.

Every contender runs in a process of its own, one after the other, and the round is repeated; where other work shares
the processor, compare the ratios of one round. The packed model is rounded from the dense one on the way.

    python scripts/bench_serve.py throughput                              # the demo model, 256 requests
    python scripts/bench_serve.py throughput --shape 1.1b --requests 24 --rounds 1
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarking.contenders import (
    Contender,
    Job,
    Settings,
    Timed,
    continuous,
    engine,
    mixed_jobs,
    static_batches,
    time_contender,
)
from benchmarking.machine import environment, in_own_process
from benchmarking.tables import Row, describe, print_with_markdown, write_json


def prepare(work: Path, shape: str) -> tuple[Path, Path]:
    """A dense model and its int4 packing."""
    from benchmarking.models import SHAPES, compress, write_model
    from compress.checkpoint.weights import Int
    from compress.common.cli import demo_model_path
    from compress.recipe import CalibrationOptions
    from compress.stages.quantize import QuantizeStage

    dense = demo_model_path()
    if shape != "demo":
        dense = work / "dense"
        write_model(dense, SHAPES[shape])
    compress(dense, work / "packed", [QuantizeStage("rtn", Int(4, 128))], CalibrationOptions())
    return dense, work / "packed"


def rows(timed: Sequence[Timed], reference: Timed) -> list[Row]:
    return [
        {
            "contender": run.name,
            "requests": str(len(run.outputs)),
            "output tokens": f"{run.num_output_tokens:,}",
            "seconds": f"{run.seconds:.1f}",
            "tokens/s": f"{run.tokens_per_second:.1f}",
            "x": f"{run.tokens_per_second / reference.tokens_per_second:.2f}",
            "x in CPU time": f"{_per_cpu_second(run) / _per_cpu_second(reference):.2f}",
            "answers equal": f"{_agreement(run, reference):.0%}",
        }
        for run in timed
    ]


def _per_cpu_second(run: Timed) -> float:
    return run.num_output_tokens / run.cpu_seconds


def _agreement(run: Timed, reference: Timed) -> float:
    pairs = list(zip(run.outputs, reference.outputs, strict=False))
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


CONTENDERS: dict[str, tuple[str, Contender]] = {
    "engine": ("engine, dense", engine),
    "one-by-one": ("transformers, one by one", static_batches),
    "static": ("transformers, static batches", static_batches),
    "continuous": ("transformers, continuous batching", continuous),
}


def run_round(models: tuple[Path, Path], jobs: list[Job], options: argparse.Namespace) -> list[Timed]:
    """Every contender once. One-by-one answers fewer jobs: its speed does not depend on how many there are."""
    dense, packed = models
    settings = Settings(batch=options.batch, dtype=options.dtype)
    timed = []
    for key in options.contenders:
        name, contender = CONTENDERS[key]
        some, own = (
            (jobs[: options.one_by_one], replace(settings, batch=1)) if key == "one-by-one" else (jobs, settings)
        )
        timed.append(in_own_process(time_contender, name, contender, dense, some, own))
        if key == "engine":
            timed.append(in_own_process(time_contender, "engine, int4", contender, packed, jobs, settings))
    return timed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="demo", choices=("demo", "tiny", "125m", "1.1b", "8b"))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--one-by-one", type=int, default=32, help="requests of the one-by-one contender")
    parser.add_argument("--shortest", type=int, default=32, help="tokens of a prompt, and of an answer")
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="sequences computed together")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="in which all of them compute"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")


def run(options: argparse.Namespace) -> int:
    console = Console(width=160, highlight=False)
    facts = in_own_process(environment) | {"dtype": options.dtype}
    console.print(describe(facts))
    rounds = []
    with tempfile.TemporaryDirectory() as work:
        models = in_own_process(prepare, Path(work), options.shape)
        jobs = mixed_jobs(models[0], options.requests, options.shortest, options.longest, options.seed)
        for number in range(1, options.rounds + 1):
            timed = run_round(models, jobs, options)
            rounds.append(timed)
            title = f"{options.shape}, round {number}: in and out {options.shortest} to {options.longest} tokens"
            table = rows(timed, timed[-1])
            print_with_markdown(f"{title}; x and equal are against the last row", table, console)
    if options.json:
        write_json(options.json, {"facts": facts, "rounds": [[asdict(run) for run in timed] for timed in rounds]})
    return 0
