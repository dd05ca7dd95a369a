"""Whole models on this CPU beside llama.cpp and transformers: prefill, decode of one sequence, decode of eight.

All have random weights of the same shape (llama.cpp needs `llama-cpp-python` and `gguf` installed). Each contender
lives in a process of its own with its model loaded; they take turns, with equal numbers of threads. With `--busy` a
process that only computes runs beside them. Figures are medians of the rounds, ratios to the first contender's.

    python scripts/bench_kernels.py cpu-models --shape 1.1b --threads 2
    python scripts/bench_kernels.py cpu-models --shape 125m --threads 1 --busy 1
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from rich.console import Console

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


class Model(Protocol):
    """A loaded model that can do both kinds of work on random tokens, greedily."""

    def prefill(self, tokens: int) -> None: ...

    def decode(self, sequences: int, steps: int) -> Timing:
        """Prompts first; the time of the steps after them."""
        ...


class Engine:
    """This runtime, offline: with sampling, scheduling and tokens handed out."""

    def __init__(self, model: Path, threads: int, kernels: str, dtype: str) -> None:
        import torch

        from runtime.core.config import RuntimeConfig
        from runtime.llm import LLM

        torch.set_num_threads(threads)
        _set_native_threads(threads)
        config = RuntimeConfig(dtype=dtype, linear_backend=kernels, max_num_seqs=8, prefix_caching=False)
        self.llm = LLM(model, config)

    def prefill(self, tokens: int) -> None:
        self._generate(1, tokens, 1)

    def decode(self, sequences: int, steps: int) -> Timing:
        watch = Stopwatch()
        self._generate(sequences, PROMPT, 1)
        first = watch.read()
        watch = Stopwatch()
        self._generate(sequences, PROMPT, steps + 1)
        both = watch.read()
        return Timing(both[0] - first[0], both[1] - first[1])

    def _generate(self, sequences: int, prompt: int, tokens: int) -> None:
        from runtime.core.request import SamplingParams

        prompts = [[(7 * index + 31 * s) % 1000 + 3 for index in range(prompt)] for s in range(sequences)]
        made = self.llm.generate(prompts, [SamplingParams(tokens, temperature=0, ignore_eos=True)] * sequences)
        if any(len(completion.token_ids) != tokens for completion in made):
            raise RuntimeError("the engine did not give as many tokens as it was asked for")


class LlamaCpp:
    """llama.cpp through its low-level Python binding, the most likely token taken each time."""

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8 * 1024, 512, 512, 8
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, 8)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def prefill(self, tokens: int) -> None:
        self._clear()
        self._run([(index * 7 % 1000 + 3, index, 0, index == tokens - 1) for index in range(tokens)])

    def decode(self, sequences: int, steps: int) -> Timing:
        self._clear()
        for s in range(sequences):
            self._run([(index * 7 % 1000 + 3, index, s, index == PROMPT - 1) for index in range(PROMPT)])
        tokens = [3] * sequences
        watch = Stopwatch()
        for step in range(steps):
            self._run([(token, PROMPT + step, s, True) for s, token in enumerate(tokens)])
            tokens = [self._best(s) for s in range(sequences)]
        return Timing(*watch.read())

    def _clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def _best(self, row: int) -> int:
        import numpy as np

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, wanted
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp could not decode")


class Transformers:
    """`transformers` in bfloat16 with its dynamic cache, step by step."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def prefill(self, tokens: int) -> None:
        self._step(1, tokens, None)

    def decode(self, sequences: int, steps: int) -> Timing:
        out = self._step(sequences, PROMPT, None)
        watch = Stopwatch()
        for _ in range(steps):
            out = self._step(sequences, 1, out.past_key_values, out.logits[:, -1:].argmax(-1))
        return Timing(*watch.read())

    def _step(self, sequences, tokens, cache, ids=None):
        with self.torch.inference_mode():
            if ids is None:
                ids = (self.torch.arange(tokens) * 7 % 1000 + 3).expand(sequences, -1)
            return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


class Contender:
    """A model in another process. `make` builds it there and must be picklable."""

    def __init__(self, name: str, make: Callable[..., Model], *arguments: object) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.load_seconds: float = self._receive()

    def run(self, task: Task) -> Timing:
        self._connection.send(task)
        return self._receive()

    def close(self) -> None:
        self._connection.close()
        self._process.join()

    def _receive(self):
        try:
            return self._connection.recv()
        except EOFError:
            raise SystemExit(f"error: {self.name} ended with status {self._process.exitcode}") from None


def _serve(connection: Connection, make: Callable[..., Model], arguments: tuple[object, ...]) -> None:
    started = time.perf_counter()
    model = make(*arguments)
    model.prefill(4)
    connection.send(time.perf_counter() - started)
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            os._exit(0)  # threads of the model need not be waited for
        connection.send(_timed(model, task))


def _timed(model: Model, task: Task) -> Timing:
    if task.sequences:
        return model.decode(task.sequences, task.tokens)
    watch = Stopwatch()
    model.prefill(task.tokens)
    return Timing(*watch.read())


def _set_native_threads(threads: int) -> None:
    from compress.cpu.binding import library, set_threads

    if library() is not None:
        set_threads(threads)


NAMES = ("llama.cpp Q4_0", "int4", "int4 w4a8", "transformers bf16")


def prepare(work: Path, shape: str, names: Sequence[str]) -> dict[str, Path]:
    """The models: dense, packed with a 4-bit body and an 8-bit head, and as GGUF."""
    from benchmarking.models import SHAPES, compress, write_gguf, write_model
    from compress.checkpoint.weights import Int
    from compress.recipe import HEAD_TARGET, CalibrationOptions, QuantizeStage

    dense = work / "dense"
    write_model(dense, SHAPES[shape])
    stages = [QuantizeStage("rtn", Int(4, 128)), QuantizeStage("rtn", Int(8, 128), targets=(HEAD_TARGET,))]
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="1.1b", choices=("tiny", "125m", "1.1b", "8b"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contenders", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill, at most 512")
    parser.add_argument("--steps", type=int, default=32, help="of a decode alone; eight sequences take half of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the contenders")
    parser.add_argument("--json", type=Path, help="write every timing here")


def compute_forever() -> None:
    value = 1
    while True:
        value = value * 3 % 1000003


def run(options: argparse.Namespace) -> int:
    console = Console(width=160, highlight=False)
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
