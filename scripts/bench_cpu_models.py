"""Whole models on this CPU beside llama.cpp and transformers: prefill, decode alone, decode of eight sequences.

Random weights of the same shape for all (llama.cpp needs `llama-cpp-python` and `gguf` installed). Contenders stay
loaded and take turns, with equal numbers of threads; with `--busy` a process that only computes runs beside them. The
median of the rounds counts, the ratio is of one's median to the first contender's, and what else the machine did is
printed.

    python scripts/bench_cpu_models.py --shape 1.1b --threads 2
    python scripts/bench_cpu_models.py --shape 125m --threads 1 --busy 1
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarking.cpu_contenders import Contender, Engine, LlamaCpp, Task, Timing, Transformers
from benchmarking.entry import leave_with
from benchmarking.memory import in_own_process
from benchmarking.tables import Row, describe, print_with_markdown, write_json
from rich.console import Console

NAMES = ("llama.cpp Q4_0", "int4", "int4 w4a8", "transformers bf16")


def prepare(work: Path, shape: str, names: Sequence[str]) -> dict[str, Path]:
    """The models: dense, packed with a 4-bit body and an 8-bit head, and as GGUF."""
    from benchmarking.compression import compress
    from benchmarking.gguf_model import write_gguf
    from benchmarking.random_model import SHAPES, write_model

    from compress.checkpoint.scheme import Scheme
    from compress.recipe import HEAD_TARGET, CalibrationOptions, QuantizeStage

    dense = work / "dense"
    write_model(dense, SHAPES[shape])
    stages = [QuantizeStage("rtn", Scheme(4, 128)), QuantizeStage("rtn", Scheme(8, 128), targets=(HEAD_TARGET,))]
    compress(dense, work / "packed", stages, CalibrationOptions())
    if NAMES[0] in names:
        write_gguf(work / "model.gguf", SHAPES[shape])
    return {"dense": dense, "packed": work / "packed", "gguf": work / "model.gguf"}


def contender(name: str, models: dict[str, Path], threads: int) -> Contender:
    if name == "llama.cpp Q4_0":
        return Contender(name, LlamaCpp, models["gguf"], threads)
    if name == "transformers bf16":
        return Contender(name, Transformers, models["dense"], threads)
    return Contender(name, Engine, models["packed"], threads, "w4a8" if "w4a8" in name else "auto", "bfloat16")


def tasks(options: argparse.Namespace) -> list[Task]:
    return [
        Task(f"prefill {options.prompt}", 0, options.prompt),
        Task("decode 1", 1, options.steps),
        Task("decode 8", 8, options.steps // 2),
    ]


def table(timings: dict[tuple[str, str], list[Timing]], work: Sequence[Task], names: Sequence[str]) -> list[Row]:
    rows = []
    for task in work:
        first = timings[names[0], task.name]
        for name in names:
            mine = timings[name, task.name]
            wall, cpu = (statistics.median(getattr(t, k) for t in mine) for k in ("seconds", "cpu_seconds"))
            base_wall, base_cpu = (statistics.median(getattr(t, k) for t in first) for k in ("seconds", "cpu_seconds"))
            rows.append(
                {
                    "work": task.name,
                    "contender": name,
                    "tokens/s": f"{task.num_tokens / wall:.1f}",
                    "tokens/CPU s": f"{task.num_tokens / cpu:.1f}",
                    "x": f"{base_wall / wall:.2f}",
                    "x in CPU time": f"{base_cpu / cpu:.2f}",
                    "slowest, fastest": f"{task.num_tokens / max(t.seconds for t in mine):.1f}, "
                    f"{task.num_tokens / min(t.seconds for t in mine):.1f}",
                }
            )
    return rows


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.1b", choices=("tiny", "125m", "1.1b", "8b"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contenders", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill, at most 512")
    parser.add_argument("--steps", type=int, default=32, help="of a decode alone; eight sequences take half of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the contenders")
    parser.add_argument("--json", type=Path, help="write every timing here")
    return parser.parse_args(arguments)


def compute_forever() -> None:
    value = 1
    while True:
        value = value * 3 % 1000003


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
    from benchmarking.machine import environment

    facts = in_own_process(environment) | {"threads": options.threads, "competing": options.busy}
    timings: dict[tuple[str, str], list[Timing]] = {}
    with tempfile.TemporaryDirectory() as work:
        models = in_own_process(prepare, Path(work), options.shape, options.contenders)
        facts["load at the start"] = f"{os.getloadavg()[0]:.1f}"
        console.print(describe(facts))
        running = [contender(name, models, options.threads) for name in options.contenders]
        console.print(", ".join(f"{each.name} ready after {each.load_seconds:.1f} s" for each in running))
        context = multiprocessing.get_context("spawn")
        busy = [context.Process(target=compute_forever, daemon=True) for _ in range(options.busy)]
        for process in busy:
            process.start()
        for _ in range(options.rounds):
            for task in tasks(options):
                for each in running:
                    timings.setdefault((each.name, task.name), []).append(each.run(task))
        for process in busy:
            process.kill()
        for each in running:
            each.close()
    title = f"{options.shape}, {options.threads} threads, medians of {options.rounds} rounds"
    print_with_markdown(title, table(timings, tasks(options), options.contenders), console)
    if options.json:
        rows = [{"contender": c, "work": w, "seconds": [t.seconds for t in ts]} for (c, w), ts in timings.items()]
        write_json(options.json, {"facts": facts, "timings": rows})
    return 0


if __name__ == "__main__":
    leave_with(main)
