"""Requests, and loaded models that answer them: this engine, three ways of transformers, and llama.cpp."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarking.machine import Stopwatch
from compress.common.errors import ToolkitError

if TYPE_CHECKING:
    from runtime.llm import LLM


@dataclass(frozen=True)
class Job:
    """One prompt and how many tokens must follow it, end tokens or not."""

    prompt: tuple[int, ...]
    num_output_tokens: int


def mixed_jobs(model: Path, count: int, shortest: int, longest: int, seed: int = 0) -> list[Job]:
    """Prompts and answers with lengths uniform in `[shortest, longest]`, prompts cut from the Python manual."""
    from calibration.sequences import load_tokenizer
    from calibration.sources import load_texts

    tokenizer = load_tokenizer(model)
    rng = random.Random(seed)
    tokens = _endless(tokenizer, load_texts("pydoc").documents)
    jobs = []
    for _ in range(count):
        prompt = tuple(next(tokens) for _ in range(rng.randint(shortest, longest)))
        jobs.append(Job(prompt, rng.randint(shortest, longest)))
    return jobs


def _endless(tokenizer, documents: list[str]) -> Iterator[int]:
    while True:
        for document in documents:
            yield from tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]


def equal_jobs(count: int, prompt: int, tokens: int) -> list[Job]:
    """Made-up prompts of one length, all different."""
    return [Job(tuple((7 * index + 31 * s) % 1000 + 3 for index in range(prompt)), tokens) for s in range(count)]


@dataclass(frozen=True)
class Settings:
    """Settings of a contender.

    Attributes:
        batch: sequences computed together where there is a choice.
        engine: more options of the engine's RuntimeConfig.
        static_cache: tokens that a static cache holds after the prompt, for transformers' own compiled `generate`; 0:
            a cache that grows.
        threads: for llama.cpp.
    """

    dtype: str = "bfloat16"
    batch: int = 64
    device: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)
    static_cache: int = 0
    threads: int = 1


Tokens = tuple[int, ...]
Answer = Callable[[Sequence[Job]], list[Tokens]]
"""As many tokens as each job asks for, chosen greedily; returns when all are on the host."""
Contender = Callable[[Path, Settings], AbstractContextManager[Answer]]


@dataclass(frozen=True)
class LoadedEngine:
    """This runtime, offline: with sampling, scheduling and tokens handed out."""

    llm: LLM

    def __call__(self, jobs: Sequence[Job]) -> list[Tokens]:
        from runtime.core.request import SamplingParams

        params = [SamplingParams(job.num_output_tokens, temperature=0, ignore_eos=True) for job in jobs]
        made = self.llm.generate([job.prompt for job in jobs], params)
        if errors := [completion.error for completion in made if completion.error]:
            raise ToolkitError(f"{len(errors)} requests failed: {errors[0]}", "Fix the engine before measuring it")
        return [tuple(completion.token_ids) for completion in made]


@contextmanager
def engine(model: Path, settings: Settings) -> Iterator[LoadedEngine]:
    from runtime.core.config import RuntimeConfig
    from runtime.llm import LLM

    sizes = {"max_num_seqs": settings.batch, "prefix_caching": False}
    yield LoadedEngine(
        LLM(model, RuntimeConfig(device=settings.device, dtype=settings.dtype, **sizes, **settings.engine))
    )


@contextmanager
def static_batches(model: Path, settings: Settings) -> Iterator[Answer]:
    """`transformers` `generate` on padded batches in order of arrival; each runs until its longest answer is complete,
    and tokens of other answers beyond their length do not count."""
    import torch
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    loaded = _load(model, settings)

    @torch.inference_mode()
    def answer_batch(jobs: Sequence[Job]) -> list[Tokens]:
        longest, count = max(len(job.prompt) for job in jobs), max(job.num_output_tokens for job in jobs)
        rows = [[0] * (longest - len(job.prompt)) + list(job.prompt) for job in jobs]
        mask = [[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in jobs]
        made = loaded.generate(
            torch.tensor(rows, device=loaded.device),
            attention_mask=torch.tensor(mask, device=loaded.device),
            do_sample=False,
            max_new_tokens=max(count, settings.static_cache),  # answers of all lengths share one graph
            min_new_tokens=count,
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(longest + count)]),
            pad_token_id=0,
            cache_implementation="static" if settings.static_cache else None,
        )
        answers = made[:, longest:].tolist()
        return [tuple(row[: job.num_output_tokens]) for row, job in zip(answers, jobs, strict=True)]

    yield lambda jobs: [
        tokens
        for start in range(0, len(jobs), settings.batch)
        for tokens in answer_batch(jobs[start : start + settings.batch])
    ]


HOST_MEMORY_SHARE = 0.1
"""Part of all memory for a cache on a CPU; by itself transformers takes 0.9 of it, whatever else runs."""


@contextmanager
def continuous(model: Path, settings: Settings) -> Iterator[Answer]:
    """`transformers`' own continuous batching. Its cache is allocated before the clock starts."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    loaded = _load(model, settings)
    share = HOST_MEMORY_SHARE if loaded.device.type == "cpu" else None
    batching = ContinuousBatchingConfig(max_memory_percent=share)
    options = {"generation_config": config, "continuous_batching_config": batching, "warmup": False}
    with loaded.continuous_batching_context_manager(**options) as manager:

        def answer(jobs: Sequence[Job]) -> list[Tokens]:
            names = [manager.add_request(list(j.prompt), max_new_tokens=j.num_output_tokens) for j in jobs]
            found: dict[str, Tokens] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = tuple(result.generated_tokens)
            return [found[name] for name in names]

        yield answer


def _load(model: Path, settings: Settings):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from compress.common.device import resolve_device

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings.dtype))
    return loaded.to(resolve_device(settings.device)).eval()


@contextmanager
def llama_cpp(model: Path, settings: Settings) -> Iterator[Answer]:
    """llama.cpp through its low-level Python binding: prompts one after the other, then all sequences together."""
    import llama_cpp as api
    import numpy as np

    silent = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(silent, None)
    loaded = api.llama_model_load_from_file(str(model).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8 * 1024, 512, 512, settings.batch
    params.n_threads = params.n_threads_batch = settings.threads
    context = api.llama_init_from_model(loaded, params)
    batch = api.llama_batch_init(512, 0, settings.batch)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))

    def run(tokens: Sequence[tuple[int, int, int]], num_wanted: int) -> list[int]:
        """The likeliest tokens after each of the last `num_wanted` of `tokens`: token, position, sequence."""
        batch.n_tokens, first = len(tokens), len(tokens) - num_wanted
        for index, (token, position, sequence) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, index >= first
        if api.llama_decode(context, batch):
            raise ToolkitError("llama.cpp could not decode", "Ask for shorter prompts: 512 tokens at most")
        rows = (api.llama_get_logits_ith(context, index) for index in range(first, len(tokens)))
        return [int(np.ctypeslib.as_array(row, shape=(vocabulary,)).argmax()) for row in rows]

    def answer(jobs: Sequence[Job]) -> list[Tokens]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        made = [
            run([(token, place, number) for place, token in enumerate(job.prompt)], 1)
            for number, job in enumerate(jobs)
        ]
        for step in range(jobs[0].num_output_tokens - 1):
            last = [(made[number][-1], len(job.prompt) + step, number) for number, job in enumerate(jobs)]
            for number, token in enumerate(run(last, len(jobs))):
                made[number].append(token)
        return [tuple(tokens) for tokens in made]

    yield answer


@dataclass(frozen=True)
class Timed:
    """One contender's run.

    Attributes:
        seconds, cpu_seconds: from the first prompt to the last token; loading and one warm-up job excluded.
        outputs: generated tokens of each job.
    """

    name: str
    seconds: float
    cpu_seconds: float
    outputs: tuple[Tokens, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds


def time_contender(name: str, contender: Contender, model: Path, jobs: Sequence[Job], settings: Settings) -> Timed:
    """Loads a contender and times its answers; raises ToolkitError when one has not the length that was asked for."""
    with contender(model, settings) as answer:
        answer([Job(jobs[0].prompt[:8], 2)])
        watch = Stopwatch()
        outputs = answer(jobs)
        times = watch.read()
    if any(len(tokens) != job.num_output_tokens for tokens, job in zip(outputs, jobs, strict=True)):
        raise ToolkitError(f"{name} did not give as many tokens as it was asked for", "Fix it before measuring it")
    return Timed(name, *times, tuple(outputs))


def step_seconds(answer: Answer, batch: int, prompt: int, steps: int) -> tuple[float, float]:
    """Wall and processor time of a decode step: the difference between many tokens and one, over the steps between."""
    taken = []
    for tokens in (1, steps + 1):
        jobs, watch = equal_jobs(batch, prompt, tokens), Stopwatch()
        answer(jobs)
        taken.append(watch.read())
    (wall, processor), (long_wall, long_processor) = taken
    return (long_wall - wall) / steps, (long_processor - processor) / steps
