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
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarking.contenders import Job, Settings, Timed, continuous, mixed_jobs
from benchmarking.machine import environment, in_own_process
from benchmarking.tables import Row, describe, markdown_table, print_with_markdown, write_json

MAX_SEQUENCES = 64
CACHE_ROOM = 128
"""Tokens that a static cache has room for behind the prompt, so that answers of two lengths share one graph."""
STEP_TOKENS = 2048
"""Prompt tokens of one step: enough for a prefill to be bound by arithmetic."""


class Model(Protocol):
    """A loaded model."""

    def answer(self, jobs: Sequence[Job]) -> None:
        """As many tokens as each job asks for; returns when all are on the host."""
        ...


class Engine:
    """This runtime, offline: with sampling, scheduling and tokens handed out."""

    def __init__(self, model: Path, device: str, kv_cache: str, kv_memory_bytes: int | None) -> None:
        from runtime.core.config import RuntimeConfig
        from runtime.llm import LLM

        self.llm = LLM(
            model,
            RuntimeConfig(
                device=device,
                kv_cache=kv_cache,
                kv_memory_bytes=kv_memory_bytes,
                max_num_seqs=MAX_SEQUENCES,
                max_num_batched_tokens=STEP_TOKENS,
                prefill_chunk=STEP_TOKENS,
                prefix_caching=False,
            ),
        )

    def answer(self, jobs: Sequence[Job]) -> None:
        from runtime.core.request import SamplingParams

        params = [SamplingParams(job.num_output_tokens, temperature=0, ignore_eos=True) for job in jobs]
        made = self.llm.generate([list(job.prompt) for job in jobs], params)
        if any(len(each.token_ids) != job.num_output_tokens for each, job in zip(made, jobs, strict=True)):
            raise RuntimeError(f"the engine did not give as many tokens as it was asked for: {made[0].error}")


class Transformers:
    """`transformers` `generate` on one batch. A `static` cache is compiled by it on a GPU; None grows with the text."""

    def __init__(self, model: Path, device: str, cache: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from compress.common.device import resolve_device

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.device, self.cache = resolve_device(device), cache
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.model = loaded.to(self.device).eval()

    def answer(self, jobs: Sequence[Job]) -> None:
        import torch
        from transformers import MaxLengthCriteria, StoppingCriteriaList

        count = jobs[0].num_output_tokens
        stop = MaxLengthCriteria(len(jobs[0].prompt) + count)
        ids = torch.tensor([job.prompt for job in jobs], device=self.device)
        with torch.inference_mode():
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max(count, CACHE_ROOM),
                min_new_tokens=count,
                stopping_criteria=StoppingCriteriaList([stop]),
                pad_token_id=0,
                cache_implementation=self.cache,
            )
        if made.cpu().shape[1] != len(jobs[0].prompt) + count:
            raise RuntimeError("transformers did not give as many tokens as it was asked for")


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        folder: which of the model's forms it loads.
        make: loads it: folder, device, bytes for keys and values. None where it cannot do single tasks.
        kv_cache: form of keys and values.
        mixed: how it answers jobs of mixed lengths; None: it does not, or does through `answer`.
    """

    name: str
    folder: str
    make: Callable[[Path, str, int | None], Model] | None
    kv_cache: str = "16bit"
    is_engine: bool = False
    mixed: Callable[[Path, Sequence[Job], Settings], Timed] | None = None


def _engine(name: str, folder: str, kv_cache: str = "16bit") -> Contender:
    def make(model: Path, device: str, kv_memory_bytes: int | None) -> Model:
        return Engine(model, device, kv_cache, kv_memory_bytes)

    return Contender(name, folder, make, kv_cache, is_engine=True)


def _transformers(name: str, cache: str | None) -> Contender:
    return Contender(name, "dense", lambda model, device, _: Transformers(model, device, cache))


CONTENDERS = {
    each.name: each
    for each in (
        _engine("engine int4", "int4"),
        _engine("engine bf16", "dense"),
        _engine("engine int4, int4 KV", "int4", "int4"),
        _engine("engine int8", "int8"),
        _transformers("transformers, eager", None),
        _transformers("transformers, compiled static cache", "static"),
        Contender("transformers, continuous batching", "dense", None, mixed=continuous),
    )
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
        first_token: seconds from before loading to the first token.
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


def measure(name: str, folders: dict[str, Path], work: Work, device: str) -> Figures:
    """All figures of one contender; runs in a process of its own, so that memory and start are its own."""
    from benchmarking.machine import peak_device_bytes, peak_host_bytes

    contender, figures = CONTENDERS[name], Figures(name)
    folder = folders[contender.folder]
    if contender.make:
        _single_tasks(contender, folder, work, device, figures)
    elif contender.mixed:
        timed = contender.mixed(folder, work.jobs, Settings(batch=MAX_SEQUENCES, device=device))
        figures.mixed = timed.tokens_per_second
    figures.peak_bytes = peak_device_bytes() or peak_host_bytes()
    return figures


def _single_tasks(contender: Contender, folder: Path, work: Work, device: str, figures: Figures) -> None:
    started = time.perf_counter()
    model = contender.make(folder, device, work.kv_memory_bytes)
    model.answer([_job(FIRST_PROMPT, 1)])
    figures.first_token = time.perf_counter() - started
    for batch in work.batches:
        figures.decode[batch] = step_seconds(model, batch, work)
        figures.step_bytes[batch] = step_bytes(folder, contender.kv_cache, batch, work.prompt + work.steps // 2)
    prompt = [_job(work.prefill, 1)]
    figures.prefill = work.prefill / _median_seconds(model, prompt, work.rounds)
    if contender.is_engine:
        tokens = sum(job.num_output_tokens for job in work.jobs)
        figures.mixed = tokens / _median_seconds(model, work.jobs, 1)


def step_seconds(model: Model, batch: int, work: Work) -> float:
    """Seconds of one decode step: the difference between many tokens and one, over the steps between."""
    short, long = ([_job(work.prompt, tokens, s) for s in range(batch)] for tokens in (1, work.steps + 1))
    differences = []
    for _ in range(work.rounds + 1):  # the first round records graphs and compiles
        first = _seconds(model, short)
        differences.append((_seconds(model, long) - first) / work.steps)
    return statistics.median(differences[1:])


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


def _median_seconds(model: Model, jobs: Sequence[Job], rounds: int) -> float:
    _seconds(model, jobs[:1])
    return statistics.median(_seconds(model, jobs) for _ in range(rounds))


def _seconds(model: Model, jobs: Sequence[Job]) -> float:
    started = time.perf_counter()
    model.answer(jobs)
    return time.perf_counter() - started


def _job(prompt: int, tokens: int, sequence: int = 0) -> Job:
    return Job(tuple((7 * index + 31 * sequence) % 1000 + 3 for index in range(prompt)), tokens)


SHAPE_NAMES = ("demo", "tiny", "125m", "1.1b", "8b", "14b")
UNKNOWN = "-"


def prepare(work: Path, shape: str, device: str) -> dict[str, Path]:
    """The model dense, and packed by rounding: 8 bits, and 4 bits with an 8-bit head."""
    from benchmarking.models import SHAPES, compress, write_model
    from compress.checkpoint.weights import Int
    from compress.common.cli import demo_model_path
    from compress.recipe import HEAD_TARGET, CalibrationOptions, QuantizeStage

    dense = demo_model_path()
    if shape != "demo":
        dense = work / "dense"
        write_model(dense, SHAPES[shape], device=device)
    folders = {"dense": dense}
    head = [QuantizeStage("rtn", Int(8, 64), targets=(HEAD_TARGET,))] if shape != "demo" else []
    for name, scheme in (("int8", Int(8, None)), ("int4", Int(4, 64 if shape == "demo" else 128))):
        folders[name] = compress(
            dense, work / name, [QuantizeStage("rtn", scheme), *head], CalibrationOptions(), device=device
        ).out
    return folders


def stream_of(device: str) -> float | None:
    """The measured read stream of a GPU in bytes per second; None on a CPU."""
    if device == "cpu":
        return None
    from benchmarking.gpu_kernels import read_stream, require_gpu

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


def measured(name: str, folders: dict[str, Path], work: Work, device: str) -> Figures:
    """A contender that fails is a row that says why; the others go on."""
    try:
        return in_own_process(measure, name, folders, work, device)
    except Exception as error:  # whatever a contender raises is its finding
        return Figures(name, error=(str(error).splitlines() or [type(error).__name__])[0][:120])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="8b", choices=SHAPE_NAMES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 64), help="sequences decoded together")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before a decode")
    parser.add_argument("--steps", type=int, default=64, help="of a decode")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--requests", type=int, default=128, help="of mixed lengths")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of such a prompt, and of its answer")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-memory", type=float, default=12, help="GB for the engine's keys and values on a GPU")
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
    with tempfile.TemporaryDirectory() as folder:
        folders = in_own_process(prepare, Path(folder), options.shape, options.device)
        jobs = mixed_jobs(folders["dense"], options.requests, options.shortest, options.longest)
        kv_bytes = None if options.device == "cpu" else round(options.kv_memory * 1e9)
        sizes = options.prompt, options.steps, options.prefill
        work = Work(tuple(options.batches), *sizes, tuple(jobs), options.rounds, kv_bytes)
        figures = []
        for name in options.contenders:
            figures.append(measured(name, folders, work, options.device))
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
