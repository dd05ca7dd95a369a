"""What is timed of a whole model on a GPU, and how many bytes a decode step must read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarking.contenders import Settings
from benchmarking.gpu_contenders import CONTENDERS, MAX_SEQUENCES, Contender, Model
from benchmarking.workload import Job

FIRST_PROMPT = 16


@dataclass(frozen=True)
class Work:
    """What every contender does.

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
    """What one contender did; None or left out where it was not asked.

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
    from benchmarking.memory import peak_device_bytes, peak_host_bytes

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
    """Of one decode step: what more tokens take longer than one."""
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
    from runtime.memory.kv import kv_token_bytes

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
