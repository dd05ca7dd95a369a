"""Whole models on one GPU: this engine dense, int8, int4 and with int4 keys and values, and transformers.

All have random weights of the same shape. Each contender runs in a process of its own, one after the other: time to
the first token, decode at several batch sizes (with the share of the card's measured read bandwidth that its bytes
are), prompts, requests of mixed lengths, peak memory, and with `--profile` where the time of a mixed step goes.
`--device cpu` with a small shape checks that it runs where there is no GPU.

    python scripts/bench_kernels.py gpu-models --shape 8b --rows models.jsonl
    python scripts/bench_kernels.py gpu-models --shape 8b --contenders "engine int4" --profile
    python scripts/bench_kernels.py gpu-models --shape 30b-a3b --layers 12 --contenders "engine int4"
    python scripts/bench_kernels.py gpu-models --shape demo --device cpu --short
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarking.contenders import (
    Answer,
    Contender,
    Job,
    LoadedEngine,
    Settings,
    continuous,
    engine,
    equal_jobs,
    mixed_jobs,
    static_batches,
    step_seconds,
)
from benchmarking.gpu.profile import profile_mixed_steps
from benchmarking.machine import Stopwatch, attempt, environment, in_own_process, peak_device_bytes, peak_host_bytes
from benchmarking.tables import Rows
from compress.common.cli import demo_model_path

MAX_SEQUENCES = 64
CACHE_ROOM = 128
"""Tokens that a static cache holds after the prompt, so that answers of two lengths share one graph."""
STEP_TOKENS = 2048
"""Prompt tokens of one step: enough for a prefill to be bound by arithmetic."""


@dataclass(frozen=True)
class Measurement:
    """One contender: a row of the table.

    Attributes:
        folder: which of the model's forms it loads.
        kv_cache: form of the engine's keys and values.
        static_cache: tokens that transformers' static cache holds after the prompt; 0: its cache grows.
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
        prefills: tokens of the prompts whose first token is timed.
        jobs: requests of mixed lengths.
        rounds: of every measurement; the median counts.
        kv_memory_bytes: for the engine's keys and values; None is its own choice.
        stream: bytes per second that the device reads; None: unknown.
        profiles: whether the engine's mixed steps are profiled.
    """

    batches: tuple[int, ...]
    prompt: int
    steps: int
    prefills: tuple[int, ...]
    jobs: tuple[Job, ...]
    rounds: int
    kv_memory_bytes: int | None = None
    stream: float | None = None
    profiles: bool = False


def measure(name: str, folder: Path, work: Work, device: str, rows: Rows) -> bool:
    """Writes all figures of one contender; runs in a process of its own, so that memory and start are its own."""
    wanted, started = MEASUREMENTS[name], Stopwatch()
    with wanted.contender(folder, wanted.settings(device, work.kv_memory_bytes)) as answer:
        if wanted.single:
            answer(equal_jobs(1, FIRST_PROMPT, 1))
            rows.add(what="start to first token", seconds=started.read()[0])
            measure_decodes(answer, folder, wanted.kv_cache, work, rows)
            if work.profiles and isinstance(answer, LoadedEngine):
                profile_mixed_steps(answer.llm.engine, rows, max(work.batches), work.prompt)
            for prompt in work.prefills:
                seconds = _median_seconds(answer, equal_jobs(1, prompt, 1), work.rounds)
                rows.add(what=f"first token of {prompt}", seconds=seconds, tokens_per_second=prompt / seconds)
        if wanted.mixed:
            tokens = sum(job.num_output_tokens for job in work.jobs)
            rows.add(what="mixed", tokens_per_second=tokens / _median_seconds(answer, work.jobs, 1))
        rows.add(what="peak", gigabytes=(peak_device_bytes() or peak_host_bytes()) / 1e9)
    return True


def measure_decodes(answer: Answer, folder: Path, kv_cache: str, work: Work, rows: Rows) -> None:
    for batch in work.batches:
        seconds = median_step_seconds(answer, batch, work)
        nbytes = step_bytes(folder, kv_cache, batch, work.prompt + work.steps // 2)
        share = {"of_the_stream": nbytes / seconds / work.stream} if work.stream else {}
        rows.add(what=f"decode {batch}", seconds=seconds, tokens_per_second=batch / seconds, bytes=nbytes, **share)


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


def prepare(form: str, work: Path, shape: str, device: str, layers: int | None = None) -> Path:
    """Returns the folder of the model in one form, which its first contender makes: dense, or in 8 or 4 bits, each with
    an 8-bit head. The demo model is rounded; others have random codes."""
    from benchmarking.models import SHAPES, compress, write_packed_model
    from compress.checkpoint.weights import Int
    from compress.recipe import CalibrationOptions
    from compress.stages.quantize import QuantizeStage

    folder, is_int8 = work / form, form == "int8"
    if shape == "demo" and form == "dense":
        return demo_model_path()
    if not folder.exists() and shape == "demo":
        stages = [QuantizeStage("rtn", Int(8, None) if is_int8 else Int(4, 64))]
        compress(demo_model_path(), folder, stages, CalibrationOptions(), device=device)
    elif not folder.exists():
        packed = (Int(8, None) if is_int8 else Int(4, 128), Int(8, 64))
        chosen = replace(SHAPES[shape], layers=layers or SHAPES[shape].layers)
        write_packed_model(folder, chosen, *((None, None) if form == "dense" else packed), device)
    return folder


SHARED_MEMORY = Path("/dev/shm")
ROOM = 4 * 10**10
"""Bytes of the three forms of a model of 8 billion parameters, and some more."""


def room_for_models() -> Path | None:
    """Returns a folder in memory that has room for large models, or None for the default of temporary files."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM
    return SHARED_MEMORY if has_room else None


def describe_device(device: str) -> dict[str, Any]:
    """Returns the environment, and as `stream` the bytes per second that a GPU reads, None on a CPU."""
    from benchmarking.gpu.timing import read_stream, require_gpu

    return environment() | {"stream": None if device == "cpu" else read_stream(require_gpu())}


def add_options(parser: argparse.ArgumentParser) -> None:
    from benchmarking.models import SHAPES

    parser.add_argument("--shape", default="8b", choices=("demo", *SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers of that shape")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--contenders", nargs="+", default=list(MEASUREMENTS), choices=list(MEASUREMENTS))
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 64), help="sequences decoded together")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before a decode")
    parser.add_argument("--steps", type=int, default=64, help="of a decode")
    parser.add_argument("--prefills", nargs="+", type=int, default=(2048, 128), help="tokens of prompts by themselves")
    parser.add_argument("--requests", type=int, default=64, help="of mixed lengths")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of such a prompt, and of its answer")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-memory", type=float, default=12, help="GB for the engine's keys and values on a GPU")
    parser.add_argument("--most-seconds", type=int, default=0, help="of a contender, which is killed then; 0: no limit")
    parser.add_argument("--profile", action="store_true", help="profile steps of this engine with prompts and decodes")
    parser.add_argument("--short", action="store_true", help="little of everything, to see whether it works")
    parser.add_argument("--rows", type=Path, help="append each figure here, as a line of JSON")


def run(options: argparse.Namespace) -> int:
    if options.short:
        options.batches, options.prompt, options.steps, options.prefills = (1, 4), 16, 8, (64,)
        options.requests, options.shortest, options.longest, options.rounds = 4, 4, 16, 1
    about = {"shape": options.shape, "layers": options.layers}
    facts = in_own_process(describe_device, options.device)
    Rows(options.rows, **about).add(**facts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the models are removed
    with tempfile.TemporaryDirectory(dir=room_for_models()) as folder:
        jobs = mixed_jobs(demo_model_path(), options.requests, options.shortest, options.longest)
        kv_bytes = None if options.device == "cpu" else round(options.kv_memory * 1e9)
        where = options.device, options.layers
        sizes = tuple(options.batches), options.prompt, options.steps, tuple(options.prefills)
        work = Work(*sizes, tuple(jobs), options.rounds, kv_bytes, facts["stream"], options.profile)
        passed = []
        for name in options.contenders:
            model = in_own_process(prepare, MEASUREMENTS[name].folder, Path(folder), options.shape, *where)
            rows = Rows(options.rows, **about, contender=name)
            passed.append(attempt(options.most_seconds, rows, measure, name, model, work, options.device, rows))
    return int(not any(passed))
