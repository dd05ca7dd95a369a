"""Whole models on one GPU: this engine dense, int8, int4 and with int4 keys and values, beside transformers.

All have random weights of the same shape. Each contender runs in a process of its own, one after the other: time to
the first token, decode at several batch sizes (with the share of the card's measured read bandwidth that its bytes
are), prefill, requests of mixed lengths, and peak memory. `--device cpu` with a small shape checks that it runs where
there is no GPU.

    python scripts/bench_kernels.py gpu-models --shape 8b --json gpu.json --markdown gpu.md
    python scripts/bench_kernels.py gpu-models --shape demo --device cpu --short
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarking.contenders import (
    Answer,
    Contender,
    Job,
    Settings,
    continuous,
    engine,
    equal_jobs,
    mixed_jobs,
    static_batches,
    step_seconds,
)
from benchmarking.machine import Stopwatch, environment, in_own_process, peak_device_bytes, peak_host_bytes, within
from benchmarking.tables import Row, describe, markdown_table, print_with_markdown, write_json
from compress.common.cli import demo_model_path

MAX_SEQUENCES = 64
CACHE_ROOM = 128
"""Tokens that a static cache has room for behind the prompt, so that answers of two lengths share one graph."""
STEP_TOKENS = 2048
"""Prompt tokens of one step: enough for a prefill to be bound by arithmetic."""


@dataclass(frozen=True)
class Measurement:
    """One contender: a row of the table.

    Attributes:
        folder: which of the model's forms it loads.
        kv_cache: form of the engine's keys and values.
        static_cache: tokens of transformers' static cache behind the prompt; 0: its cache grows.
        single, mixed: whether it does single tasks, and requests of mixed lengths.
        overlap: the engine submits a step before it reads the last one.
    """

    folder: str
    contender: Contender
    kv_cache: str = "16bit"
    static_cache: int = 0
    single: bool = True
    mixed: bool = True
    overlap: bool = True

    def settings(self, device: str, kv_memory_bytes: int | None) -> Settings:
        sizes = {"max_num_batched_tokens": STEP_TOKENS, "prefill_chunk": STEP_TOKENS}
        # What is compiled or captured later would count as time of a step.
        cache = {"kv_cache": self.kv_cache, "kv_memory_bytes": kv_memory_bytes, "warm_up": True}
        options = sizes | cache | {"overlap": self.overlap}
        return Settings(batch=MAX_SEQUENCES, device=device, engine=options, static_cache=self.static_cache)


MEASUREMENTS = {
    "engine int4": Measurement("int4", engine),
    "engine bf16": Measurement("dense", engine),
    "engine int4, int4 KV": Measurement("int4", engine, kv_cache="int4"),
    "engine int8": Measurement("int8", engine),
    "transformers, eager": Measurement("dense", static_batches, mixed=False),
    "transformers, compiled static cache": Measurement("dense", static_batches, static_cache=CACHE_ROOM, mixed=False),
    "transformers, continuous batching": Measurement("dense", continuous, single=False),
    "engine int4, serial steps": Measurement("int4", engine, overlap=False),
}


FIRST_PROMPT = 16


@dataclass(frozen=True)
class Work:
    """Work of every contender.

    Attributes:
        batches: sequences that are decoded together, one measurement each.
        prompt, steps: tokens before a decode, and steps of it that are timed.
        prefill: tokens of the prompt whose prefill is timed.
        jobs: requests of mixed lengths.
        rounds: of every measurement; the median counts.
        kv_memory_bytes: for the engine's keys and values; None is its own choice.
    """

    batches: tuple[int, ...]
    prompt: int
    steps: int
    prefill: int
    jobs: tuple[Job, ...]
    rounds: int
    kv_memory_bytes: int | None = None


@dataclass
class Figures:
    """Figures of one contender; None or left out where it was not asked.

    Attributes:
        first_token: seconds from before loading to the first token, compiling and capturing included.
        decode: seconds of a step, by batch.
        step_bytes: weights, keys and values that such a step must read.
        prefill: tokens per second.
        mixed: tokens per second that came out.
        peak_bytes: the most memory on the device, or of the process where there is no GPU.
        error: why it is not measured.
    """

    name: str
    first_token: float | None = None
    decode: dict[int, float] = field(default_factory=dict)
    step_bytes: dict[int, int] = field(default_factory=dict)
    prefill: float | None = None
    mixed: float | None = None
    peak_bytes: int = 0
    error: str = ""


def measure(name: str, folder: Path, work: Work, device: str) -> Figures:
    """All figures of one contender; runs in a process of its own, so that memory and start are its own."""
    wanted, figures = MEASUREMENTS[name], Figures(name)
    started = Stopwatch()
    with wanted.contender(folder, wanted.settings(device, work.kv_memory_bytes)) as answer:
        if wanted.single:
            answer(equal_jobs(1, FIRST_PROMPT, 1))
            figures.first_token = started.read()[0]
            for batch in work.batches:
                figures.decode[batch] = median_step_seconds(answer, batch, work)
                context = work.prompt + work.steps // 2
                figures.step_bytes[batch] = step_bytes(folder, wanted.kv_cache, batch, context)
            prompt = equal_jobs(1, work.prefill, 1)
            figures.prefill = work.prefill / _median_seconds(answer, prompt, work.rounds)
        if wanted.mixed:
            tokens = sum(job.num_output_tokens for job in work.jobs)
            figures.mixed = tokens / _median_seconds(answer, work.jobs, 1)
    figures.peak_bytes = peak_device_bytes() or peak_host_bytes()
    return figures


def median_step_seconds(answer: Answer, batch: int, work: Work) -> float:
    """Seconds of one decode step. The first round, which records graphs and compiles, does not count."""
    times = [step_seconds(answer, batch, work.prompt, work.steps)[0] for _ in range(work.rounds + 1)]
    return statistics.median(times[1:])


def step_bytes(folder: Path, kv_cache: str, batch: int, context: int) -> int:
    """Bytes that a decode step reads at least: every weight but the embedding, once, and all keys and values."""
    from compress.checkpoint.config import read_config
    from compress.checkpoint.kv_cache import KVCacheScheme
    from compress.checkpoint.safetensors import TensorFiles
    from runtime.core.model_config import parse_config
    from runtime.memory.estimate import kv_token_bytes

    files = TensorFiles.open(folder)
    names = files.names()
    has_head = any(name.startswith("lm_head.") for name in names)
    read = [name for name in names if not (has_head and "embed_tokens" in name)]
    weights = sum(files.tensor(name).nbytes for name in read)
    return weights + batch * context * kv_token_bytes(parse_config(read_config(folder)), KVCacheScheme(kv_cache))


def _median_seconds(answer: Answer, jobs: Sequence[Job], rounds: int) -> float:
    answer(jobs[:1])
    times = []
    for _ in range(rounds):
        watch = Stopwatch()
        answer(jobs)
        times.append(watch.read()[0])
    return statistics.median(times)


SHAPE_NAMES = ("demo", "tiny", "125m", "1.1b", "8b", "14b")
UNKNOWN = "-"


def prepare(form: str, work: Path, shape: str, device: str) -> Path:
    """Returns the folder of the model in one form, which its first contender makes: dense, or in 8 or 4 bits, each with
    an 8-bit head. The demo model is rounded; others have random codes."""
    from benchmarking.models import SHAPES, compress, write_packed_model
    from compress.checkpoint.weights import Int
    from compress.recipe import CalibrationOptions, QuantizeStage

    folder, is_int8 = work / form, form == "int8"
    if shape == "demo" and form == "dense":
        return demo_model_path()
    if not folder.exists() and shape == "demo":
        stages = [QuantizeStage("rtn", Int(8, None) if is_int8 else Int(4, 64))]
        compress(demo_model_path(), folder, stages, CalibrationOptions(), device=device)
    elif not folder.exists():
        packed = (Int(8, None) if is_int8 else Int(4, 128), Int(8, 64))
        write_packed_model(folder, SHAPES[shape], *((None, None) if form == "dense" else packed), device)
    return folder


SHARED_MEMORY = Path("/dev/shm")
ROOM = 4 * 10**10
"""Bytes of the three forms of a model of 8 billion parameters, and some more."""


def room_for_models() -> Path | None:
    """Returns a folder in memory that has room for large models, or None for the default of temporary files."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM
    return SHARED_MEMORY if has_room else None


def stream_of(device: str) -> float | None:
    """The measured read stream of a GPU in bytes per second; None on a CPU."""
    if device == "cpu":
        return None
    from benchmarking.gpu.kernels import read_stream, require_gpu

    return read_stream(require_gpu())


def table(figures: Sequence[Figures], batches: Sequence[int], stream: float | None) -> list[Row]:
    return [_row(each, batches, stream) for each in figures]


def _row(each: Figures, batches: Sequence[int], stream: float | None) -> Row:
    row = {"contender": each.name, "first token": _number(each.first_token, "{:.1f} s")}
    for batch in batches:
        seconds = each.decode.get(batch)
        row[f"decode {batch}"] = _number(seconds and batch / seconds, "{:.0f}")
        share = each.step_bytes[batch] / seconds / stream if seconds and stream else None
        row[f"stream {batch}"] = _number(share, "{:.0%}")
    row["prefill"] = _number(each.prefill, "{:.0f}")
    row["mixed"] = _number(each.mixed, "{:.0f}")
    row["peak GB"] = _number(each.peak_bytes / 1e9 or None, "{:.2f}")
    return row | {"note": each.error}


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def measured(name: str, models: Path, shape: str, work: Work, device: str, seconds: int = 0) -> Figures:
    """Figures of a contender over its form of the model in the folder `models`. One that fails, or takes over `seconds`
    if these are not 0, is a row that says why; the others go on."""
    try:
        folder = in_own_process(prepare, MEASUREMENTS[name].folder, models, shape, device)
        return in_own_process(within, seconds, measure, name, folder, work, device)
    except BrokenProcessPool:
        return Figures(name, error="its process was killed" + (f", or took {seconds} s" if seconds else ""))
    except Exception as error:  # whatever a contender raises is its finding
        return Figures(name, error=(str(error).splitlines() or [type(error).__name__])[0][:120])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="8b", choices=SHAPE_NAMES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--contenders", nargs="+", default=list(MEASUREMENTS), choices=list(MEASUREMENTS))
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 64), help="sequences decoded together")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before a decode")
    parser.add_argument("--steps", type=int, default=64, help="of a decode")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--requests", type=int, default=128, help="of mixed lengths")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of such a prompt, and of its answer")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-memory", type=float, default=12, help="GB for the engine's keys and values on a GPU")
    parser.add_argument("--most-seconds", type=int, default=0, help="of a contender, which is killed then; 0: no limit")
    parser.add_argument("--short", action="store_true", help="little of everything, to see whether it works")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here")


def run(options: argparse.Namespace) -> int:
    console = Console(width=200, highlight=False)
    if options.short:
        options.batches, options.prompt, options.steps, options.prefill = (1, 4), 16, 8, 64
        options.requests, options.shortest, options.longest, options.rounds = 4, 4, 16, 1
    stream = in_own_process(stream_of, options.device)
    facts = in_own_process(environment) | {"shape": options.shape, "read stream GB/s": stream and round(stream / 1e9)}
    console.print(describe(facts))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the models are removed
    with tempfile.TemporaryDirectory(dir=room_for_models()) as folder:
        jobs = mixed_jobs(demo_model_path(), options.requests, options.shortest, options.longest)
        kv_bytes = None if options.device == "cpu" else round(options.kv_memory * 1e9)
        sizes = options.prompt, options.steps, options.prefill
        work = Work(tuple(options.batches), *sizes, tuple(jobs), options.rounds, kv_bytes)
        figures = []
        for name in options.contenders:
            figures.append(measured(name, Path(folder), options.shape, work, options.device, options.most_seconds))
            write(options, facts, figures, stream)  # after each contender: the run may be cut off
    title = f"{options.shape}: tokens/s of decode by batch, its share of the read stream, prefill and mixed requests"
    print_with_markdown(title, table(figures, options.batches, stream), console)
    return 1 if all(each.error for each in figures) else 0


def write(
    options: argparse.Namespace, facts: Mapping[str, Any], figures: Sequence[Figures], stream: float | None
) -> None:
    """Writes the figures so far to the files that were asked for."""
    if options.markdown:
        text = f"{describe(facts)}\n\n{markdown_table(table(figures, options.batches, stream))}"
        options.markdown.write_text(text, encoding="utf-8")
    if options.json:
        write_json(options.json, {"facts": facts, "figures": [asdict(each) for each in figures]})
