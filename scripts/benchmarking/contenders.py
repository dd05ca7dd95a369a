"""Requests of mixed lengths over real text, and ways to answer them: this engine, and three ways of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarking.machine import Stopwatch
from compress.common.errors import ToolkitError


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
    outputs: tuple[tuple[int, ...], ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds


@dataclass(frozen=True)
class Settings:
    """Settings of all contenders. `batch` is the number of sequences computed together where there is a choice."""

    dtype: str = "bfloat16"
    batch: int = 64
    speculate: str = ""
    device: str = "auto"


def engine(model: Path, jobs: Sequence[Job], settings: Settings) -> Timed:
    """This runtime, offline, with default settings except for the number of sequences."""
    from runtime.core.config import RuntimeConfig
    from runtime.core.request import SamplingParams
    from runtime.llm import LLM

    sizes = {"max_num_seqs": settings.batch, "prefix_caching": False}
    llm = LLM(model, RuntimeConfig(device=settings.device, dtype=settings.dtype, **sizes))

    def answer(some: Sequence[Job]) -> list[tuple[int, ...]]:
        params = [SamplingParams(job.num_output_tokens, temperature=0, ignore_eos=True) for job in some]
        made = llm.generate([job.prompt for job in some], params)
        if errors := [completion.error for completion in made if completion.error]:
            raise ToolkitError(f"{len(errors)} requests failed: {errors[0]}", "Fix the engine before measuring it")
        return [tuple(completion.token_ids) for completion in made]

    return _time("engine", answer, jobs)


def one_by_one(model: Path, jobs: Sequence[Job], settings: Settings) -> Timed:
    """`transformers` `generate`, one prompt after the other."""
    return _generate_batches("transformers, one by one", model, jobs, settings, 1)


def static_batches(model: Path, jobs: Sequence[Job], settings: Settings) -> Timed:
    """`transformers` `generate` on padded batches in order of arrival; each runs until its longest answer is complete,
    and tokens of other answers beyond their length do not count."""
    return _generate_batches("transformers, static batches", model, jobs, settings, settings.batch)


def continuous(model: Path, jobs: Sequence[Job], settings: Settings) -> Timed:
    """`transformers`' own continuous batching. Its cache is allocated before the clock starts."""
    from transformers import GenerationConfig

    loaded = _load(model, settings)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    with loaded.continuous_batching_context_manager(generation_config=config, warmup=False) as manager:

        def answer(some: Sequence[Job]) -> list[tuple[int, ...]]:
            names = [manager.add_request(list(j.prompt), max_new_tokens=j.num_output_tokens) for j in some]
            found: dict[str, tuple[int, ...]] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = tuple(result.generated_tokens)
            return [found[name] for name in names]

        return _time("transformers, continuous batching", answer, jobs)


CONTENDERS: dict[str, Callable[[Path, Sequence[Job], Settings], Timed]] = {
    "engine": engine,
    "one-by-one": one_by_one,
    "static": static_batches,
    "continuous": continuous,
}


def _generate_batches(name: str, model: Path, jobs: Sequence[Job], settings: Settings, batch: int) -> Timed:
    import torch

    loaded = _load(model, settings)

    @torch.inference_mode()
    def answer(some: Sequence[Job]) -> list[tuple[int, ...]]:
        outputs = []
        for start in range(0, len(some), batch):
            group = some[start : start + batch]
            longest = max(len(job.prompt) for job in group)
            ids = torch.tensor([[0] * (longest - len(job.prompt)) + list(job.prompt) for job in group])
            mask = torch.tensor([[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in group])
            count = max(job.num_output_tokens for job in group)
            ids, mask = ids.to(loaded.device), mask.to(loaded.device)
            made = loaded.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
            )
            outputs += [
                tuple(row[longest:][: job.num_output_tokens].tolist()) for row, job in zip(made, group, strict=True)
            ]
        return outputs

    return _time(name, answer, jobs)


def _load(model: Path, settings: Settings):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from compress.common.device import resolve_device

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings.dtype))
    return loaded.to(resolve_device(settings.device)).eval()


def _time(name: str, answer: Callable[[Sequence[Job]], list[tuple[int, ...]]], jobs: Sequence[Job]) -> Timed:
    answer([Job(jobs[0].prompt[:8], 2)])
    watch = Stopwatch()
    outputs = answer(jobs)
    return Timed(name, *watch.read(), tuple(outputs))
