"""Whole models on this CPU, compared with llama.cpp and transformers: prefill, decode of one sequence, decode of eight.

All have random weights of the same shape (llama.cpp needs `llama-cpp-python` and `gguf` installed). Each contender
lives in a process of its own with its model loaded; they take turns, with equal numbers of threads. With `--busy`,
processes that only compute run at the same time. Figures are medians of the rounds, ratios to the first contender's.
With `--gguf-type` the contenders are llama.cpp and this runtime on one file, made by llama.cpp's quantizer.

    python scripts/bench_kernels.py cpu-models --shape 1.1b --threads 2
    python scripts/bench_kernels.py cpu-models --shape 125m --threads 1 --busy 1
    python scripts/bench_kernels.py cpu-models --shape 1.1b --threads 2 --gguf-type q4_k
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

from benchmarking.contenders import (
    Answer,
    Contender,
    Settings,
    engine,
    equal_jobs,
    llama_cpp,
    static_batches,
    step_seconds,
)
from benchmarking.machine import Stopwatch, environment, in_own_process
from benchmarking.tables import Row, describe, print_with_markdown, write_json

PROMPT = 16
"""Tokens before a decode; the steps after it are timed."""


@dataclass(frozen=True)
class Task:
    """A piece of work that is timed.

    Attributes:
        sequences: that are decoded together; 0 asks for a prefill.
        tokens: steps of the decode, or tokens of the prompt.
    """

    name: str
    sequences: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        return max(1, self.sequences) * self.tokens


@dataclass(frozen=True)
class Timing:
    seconds: float
    cpu_seconds: float


class Loaded:
    """A contender with its model in memory, in a process of its own."""

    def __init__(self, *contender: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *contender), daemon=True)
        self._process.start()
        theirs.close()
        self.load_seconds = self._connection.recv()

    def run(self, task: Task) -> Timing:
        self._connection.send(task)
        return self._connection.recv()

    def close(self) -> None:
        self._process.kill()  # threads of the model need not be waited for


def _serve(connection: Connection, contender: Contender, model: Path, settings: Settings) -> None:
    import torch

    from compress.cpu.binding import library, set_threads

    torch.set_num_threads(settings.threads)
    if library() is not None:
        set_threads(settings.threads)
    watch = Stopwatch()
    with contender(model, settings) as answer:
        answer(equal_jobs(1, 4, 1))
        connection.send(watch.read()[0])
        while True:
            connection.send(_timed(answer, connection.recv()))


def _timed(answer: Answer, task: Task) -> Timing:
    if task.sequences:
        wall, processor = step_seconds(answer, task.sequences, PROMPT, task.tokens)
        return Timing(wall * task.tokens, processor * task.tokens)
    watch = Stopwatch()
    answer(equal_jobs(1, task.tokens, 1))
    return Timing(*watch.read())


CONTENDERS: dict[str, tuple[Contender, str, Settings]] = {
    "llama.cpp Q4_0": (llama_cpp, "gguf", Settings()),
    "int4": (engine, "packed", Settings(engine={"activations": "16bit"})),
    "int4 w4a8": (engine, "packed", Settings(engine={"activations": "8bit"})),
    "transformers bf16": (static_batches, "dense", Settings()),
}
NAMES = tuple(CONTENDERS)
SAME_FILE: dict[str, tuple[Contender, str, Settings]] = {
    "llama.cpp": (llama_cpp, "file", Settings()),
    "runtime": (engine, "folder", Settings()),
}
"""Contenders on one GGUF file."""


def prepare(work: Path, shape: str, names: Sequence[str]) -> dict[str, Path]:
    """Writes the models that are not there: dense, packed with a 4-bit body and an 8-bit head, and as GGUF."""
    from benchmarking.models import SHAPES, compress, write_gguf, write_model
    from compress.checkpoint.weights import Int
    from compress.recipe import CalibrationOptions
    from compress.stages.quantize import HEAD_TARGET, QuantizeStage

    dense, packed, gguf = (work / name for name in ("dense", "packed", "model.gguf"))
    work.mkdir(parents=True, exist_ok=True)
    if not dense.exists():
        write_model(dense, SHAPES[shape])
    stages = [QuantizeStage("rtn", Int(4, 128)), QuantizeStage("rtn", Int(8, 128), targets=(HEAD_TARGET,))]
    if not packed.exists():
        compress(dense, packed, stages, CalibrationOptions())
    if NAMES[0] in names and not gguf.exists():
        write_gguf(gguf, SHAPES[shape])
    return {"dense": dense, "packed": packed, "gguf": gguf}


def prepare_gguf(work: Path, shape: str, kind: str) -> dict[str, Path]:
    """Writes the GGUF file of a mix, where it is not there, and opens it."""
    from benchmarking.llama import quantize
    from benchmarking.models import SHAPES, write_model
    from compress.checkpoint.gguf.export import export_gguf
    from compress.checkpoint.gguf.folder import folder_of
    from compress.checkpoint.gguf.mixes import find_mix

    dense, file = work / "dense", work / f"{kind}.gguf"
    work.mkdir(parents=True, exist_ok=True)
    if not dense.exists():
        write_model(dense, SHAPES[shape])
    if not (work / "dense.gguf").exists():
        export_gguf(dense, work / "dense.gguf")
    if not file.exists():
        quantize(work / "dense.gguf", file, find_mix(kind).number)
    return {"file": file, "folder": folder_of(file)}


def load(name: str, models: dict[str, Path], threads: int) -> Loaded:
    contender, model, chosen = (CONTENDERS | SAME_FILE)[name]
    return Loaded(contender, models[model], replace(chosen, batch=8, device="cpu", threads=threads))


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="1.1b", choices=("tiny", "125m", "1.1b", "1b-hybrid", "2b-a400m", "8b"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contenders", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--gguf-type", help="compare llama.cpp and this runtime on one file of this type instead")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill, at most 512")
    parser.add_argument("--steps", type=int, default=32, help="of a decode alone; eight sequences take half of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute while the contenders run")
    parser.add_argument("--work", type=Path, help="keep the models in a folder here, and use what is there of them")
    parser.add_argument("--json", type=Path, help="write every timing here")


def compute_forever() -> None:
    value = 1
    while True:
        value = value * 3 % 1000003


def run(options: argparse.Namespace) -> int:
    console = Console(width=160, highlight=False)
    facts = in_own_process(environment) | {"threads": options.threads, "competing": options.busy}
    timings: dict[tuple[str, str], list[Timing]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)) / options.shape
        if options.gguf_type:
            options.contenders = tuple(SAME_FILE)
            models = in_own_process(prepare_gguf, work, options.shape, options.gguf_type)
        else:
            models = in_own_process(prepare, work, options.shape, options.contenders)
        facts["load at the start"] = f"{os.getloadavg()[0]:.1f}"
        console.print(describe(facts))
        running = {name: load(name, models, options.threads) for name in options.contenders}
        ready = (f"{name} ready after {each.load_seconds:.1f} s" for name, each in running.items())
        console.print(", ".join(ready))
        context = multiprocessing.get_context("spawn")
        busy = [context.Process(target=compute_forever, daemon=True) for _ in range(options.busy)]
        for process in busy:
            process.start()
        for _ in range(options.rounds):
            for task in tasks(options):
                for name, each in running.items():
                    timings.setdefault((name, task.name), []).append(each.run(task))
        for process in busy:
            process.kill()
        for each in running.values():
            each.close()
    kind = f" {options.gguf_type}" if options.gguf_type else ""
    title = f"{options.shape}{kind}, {options.threads} threads, medians of {options.rounds} rounds"
    print_with_markdown(title, table(timings, tasks(options), options.contenders), console)
    if options.json:
        rows = [{"contender": c, "work": w, "seconds": [t.seconds for t in ts]} for (c, w), ts in timings.items()]
        write_json(options.json, {"facts": facts, "timings": rows})
    return 0
