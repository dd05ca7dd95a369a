"""Load of a benchmark: requests, their arrival, and the record of each. Does not import the HTTP client, which keeps
--help fast."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import typer

from compress.common.cli import option
from compress.common.errors import DataError, ToolkitError
from compress.common.files import json_lines


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts, uniform from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses `128` or `32:256`. Raises ValueError for anything else."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text!r} is not a range of token counts")
        return lengths

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def read_lengths(text: str | Lengths) -> Lengths:
    """Parses a range of a command line; a default is one already. Raises typer.BadParameter for anything else."""
    try:
        return text if isinstance(text, Lengths) else Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: write tokens as 128, or as 32:256 for uniform") from error


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its route, and its body without the fields that all bodies share."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Number and lengths of requests."""

    input: Lengths = option(
        "--input-len",
        default=Lengths(32, 256),
        parser=read_lengths,
        metavar="TOKENS",
        help="Prompt tokens after the shared prefix: 128, or 32:256 for a uniform distribution.",
    )
    output: Lengths = option(
        "--output-len",
        default=Lengths(32, 256),
        parser=read_lengths,
        metavar="TOKENS",
        help="Output tokens: 64, or 32:256.",
    )
    num_requests: int = option("--num-prompts", "-n", default=64, min=1, help="Number of measured requests.")
    shared_prefix: int = option(
        "--prefix-len", default=0, min=0, help="Tokens at the start of every prompt, the same for all."
    )
    seed: int = option(default=0, min=0, help="Seed of lengths, texts and arrivals.")


@dataclass(frozen=True, slots=True)
class Workload(RequestLengths):
    """Requests of a run. Answers have exactly as many tokens as asked for, because end tokens are ignored."""

    temperature: float = option(default=0.0, min=0, help="Sampling temperature; 0 is greedy.")

    def from_text(self, token_ids: Sequence[int], count: int | None = None, seed_offset: int = 0) -> list[Job]:
        """Returns jobs whose prompts are random pieces of a tokenized text.

        Args:
            seed_offset: another value gives other prompts, with another prefix, of the same distribution.
        """
        if not token_ids:
            raise DataError("the text for the prompts has no tokens", "Give --prompts FILE.jsonl")
        generator = random.Random(f"{self.seed}/{seed_offset}/prompts")
        prefix = _piece(token_ids, self.shared_prefix, generator)
        jobs = []
        for index in range(self.num_requests if count is None else count):
            prompt = prefix + _piece(token_ids, self.input.draw(generator), generator)
            jobs.append(Job("/v1/completions", {"prompt": prompt, **self._answer(index, self.output.draw(generator))}))
        return jobs

    def from_prompts(self, prompts: Sequence[dict[str, Any]]) -> list[Job]:
        """Returns jobs with the given prompts in turn."""
        generator = random.Random(f"{self.seed}/lengths")
        jobs = []
        for index in range(self.num_requests):
            given = prompts[index % len(prompts)]
            path = "/v1/chat/completions" if "messages" in given else "/v1/completions"
            jobs.append(Job(path, {**self._answer(index, self.output.draw(generator)), **given}))
        return jobs

    def arrivals(self, rate: float) -> list[float]:
        """Returns arrival times in seconds of a Poisson process with `rate` requests per second; the first is 0."""
        generator = random.Random(f"{self.seed}/arrivals")
        gaps = (generator.expovariate(rate) for _ in range(self.num_requests - 1))
        return list(accumulate(gaps, initial=0.0))

    def _answer(self, index: int, max_tokens: int) -> dict[str, Any]:
        return {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": self.seed + index,
        }


DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Arrival of requests: a closed loop, or an open one where a rate is given. Raises ToolkitError for both."""

    concurrency: int | None = option(
        "--max-concurrency",
        "-c",
        default=None,
        min=1,
        help=f"Closed loop: number of clients that wait for their answers. Default: {DEFAULT_CONCURRENCY}.",
    )
    rate: float | None = option(
        "--request-rate", "-r", default=None, min=1e-3, help="Open loop: requests per second, with Poisson arrivals."
    )

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            problem = "--request-rate and --max-concurrency exclude each other"
            raise ToolkitError(problem, "Use one: open or closed loop")

    @property
    def num_clients(self) -> int:
        return self.concurrency or DEFAULT_CONCURRENCY

    def __str__(self) -> str:
        if self.rate is None:
            return f"closed loop, concurrency {self.num_clients}"
        return f"open loop, {self.rate:g} requests/s"


def _piece(token_ids: Sequence[int], length: int, generator: random.Random) -> list[int]:
    """Returns `length` tokens from a random position, wrapping around at the end of the text."""
    start = generator.randrange(len(token_ids))
    rounds = -(-(start + length) // len(token_ids))
    return (list(token_ids) * rounds)[start : start + length]


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Reads lines `{"prompt": ...}` or `{"messages": [...]}`, with optional `max_tokens`.

    Raises:
        DataError: no such file, or an invalid line, by number.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}", "Give --prompts an existing file")
    prompts = [_prompt(entry, place) for place, entry in json_lines(path)]
    if not prompts:
        raise DataError(f"{path} has no lines", 'Write lines such as {"prompt": "Once upon a time"}')
    return prompts


def _prompt(entry: Any, place: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or len({"prompt", "messages"} & entry.keys()) != 1:
        raise DataError(f"{place} has neither prompt nor messages, or both", "Give one of them")
    if unknown := entry.keys() - {"prompt", "messages", "max_tokens"}:
        raise DataError(f"{place} has the unknown field {min(unknown)!r}", "Remove it")
    return entry


def python_manual() -> str:
    """Returns the reference manual, real text that is part of every CPython."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ToolkitError("this Python has no pydoc_data", "Give --prompts FILE.jsonl") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


@dataclass(slots=True)
class Record:
    """Record of one request. Times are seconds since the start of the run.

    Attributes:
        start: due time (open loop) or time of sending (closed loop).
        chunk_times: arrivals of streamed text. A chunk is one step of the engine and may hold several tokens.
        output_tokens: token count of the server's usage.
        status: HTTP status; 0 without an answer.
        error: reason of a failure; empty for a complete answer.
    """

    start: float
    end: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds from the start to the first text."""
        return self.chunk_times[0] - self.start

    @property
    def e2e(self) -> float:
        """Seconds from the start to the end of the answer."""
        return self.end - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [after - before for before, after in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token."""
        later = self.output_tokens - 1
        return (self.chunk_times[-1] - self.chunk_times[0]) / later if later > 0 else None
