"""What is asked: prompts and answers of given lengths, and when. A seed gives the same workload everywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from compress.checkpoint.errors import DataError, ToolkitError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts, uniform from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Of `128` or `32:256`. Raises ValueError for anything else."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text!r} is no range of token counts")
        return lengths

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Job:
    """One request: which route, and the body without what all bodies share."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Recipe of a run.

    Attributes:
        input: own prompt tokens of a request.
        output: tokens of an answer; exact, because the model's end tokens are ignored.
        shared_prefix: tokens in front of every prompt, the same for all.
        seed: of lengths, texts and arrivals.
    """

    input: Lengths
    output: Lengths
    num_requests: int
    shared_prefix: int = 0
    temperature: float = 0.0
    seed: int = 0

    def from_text(self, token_ids: Sequence[int], count: int | None = None, seed_offset: int = 0) -> list[Job]:
        """Jobs whose prompts are pieces of a tokenized text, each from a place of its own.

        Args:
            seed_offset: another one gives other prompts, with another prefix, of the same kind.
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
        """Jobs that take the given prompts in turn, as often as it needs."""
        generator = random.Random(f"{self.seed}/lengths")
        jobs = []
        for index in range(self.num_requests):
            given = prompts[index % len(prompts)]
            path = "/v1/chat/completions" if "messages" in given else "/v1/completions"
            jobs.append(Job(path, {**self._answer(index, self.output.draw(generator)), **given}))
        return jobs

    def arrivals(self, rate: float) -> list[float]:
        """Seconds at which the requests of a Poisson process of `rate` per second arrive; the first comes at once."""
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


def _piece(token_ids: Sequence[int], length: int, generator: random.Random) -> list[int]:
    """So many tokens from a random place, around the end of the text if need be."""
    start = generator.randrange(len(token_ids))
    rounds = -(-(start + length) // len(token_ids))
    return (list(token_ids) * rounds)[start : start + length]


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Lines `{"prompt": ...}` or `{"messages": [...]}`, with `max_tokens` if an answer has a length of its own.

    Raises:
        DataError: no file, or a line that is something else, by number.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}", "Give --prompts an existing file")
    prompts = list(_prompt_lines(path))
    if not prompts:
        raise DataError(f"{path} has no lines", 'Write lines such as {"prompt": "Once upon a time"}')
    return prompts


def _prompt_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", "Convert it") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}", "One JSON object a line") from error
        if not isinstance(entry, dict) or len({"prompt", "messages"} & entry.keys()) != 1:
            raise DataError(f"{path}:{number} has neither prompt nor messages, or both", "Give one of them")
        unknown = entry.keys() - {"prompt", "messages", "max_tokens"}
        if unknown:
            raise DataError(f"{path}:{number} has the unknown field {min(unknown)!r}", "Remove it")
        yield entry


def python_manual() -> str:
    """Real text that every CPython brings: the reference manual."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ToolkitError("this Python has no pydoc_data", "Give --prompts FILE.jsonl") from error
    return "\n\n".join(topics[name] for name in sorted(topics))
