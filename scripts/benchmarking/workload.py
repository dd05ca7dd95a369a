"""Requests of mixed lengths over real text, the same for every contender."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
