"""Whole models on one device: this engine in its forms, and transformers in its own. Greedy, random tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarking.contenders import Settings, Timed, continuous
from benchmarking.workload import Job

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
        _engine("engine bf16", "dense"),
        _engine("engine int8", "int8"),
        _engine("engine int4", "int4"),
        _engine("engine int4, int4 KV", "int4", "int4"),
        _transformers("transformers, eager", None),
        _transformers("transformers, compiled static cache", "static"),
        Contender("transformers, continuous batching", "dense", None, mixed=continuous),
    )
}
