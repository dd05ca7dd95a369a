"""Requests of a simulation: lengths and times of published traces, uniform ones, or those of a file. No torch."""

from __future__ import annotations

import csv
import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from compress.common.errors import DataError
from compress.common.files import json_lines
from compress.common.registry import Registry

TRACE_BLOCK = 512
"""Tokens of each of the `hash_ids` of a trace in Mooncake's format."""
PIECE_IDS = 2**32
"""Token ids that each piece of a prompt may have of its own."""


class Piece(NamedTuple):
    """Part of a prompt: equal names stand for equal tokens."""

    name: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A request.

    Attributes:
        at: seconds since the start.
        pieces: parts of the prompt, if it may have a prefix that others have; empty if not.
    """

    name: str
    at: float
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[Piece, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def token_ids(self) -> tuple[int, ...]:
        """Returns token ids of the prompt, equal where pieces are."""
        ranges = (range(name * PIECE_IDS, name * PIECE_IDS + num_tokens) for name, num_tokens in self.pieces)
        return tuple(token for each in ranges for token in each) if self.pieces else (0,) * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Percentiles of a number of tokens; between two of them its logarithm is uniform."""

    tokens: tuple[int, ...]

    def draw(self, generator: random.Random) -> int:
        """Returns a length."""
        percent = 100 * generator.random()
        left = bisect(PERCENTS, percent) - 1
        (low, high), (first, last) = PERCENTS[left : left + 2], map(log, self.tokens[left : left + 2])
        return round(exp(first + (last - first) * (percent - low) / (high - low)))


PERCENTS = (0, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Lengths and arrivals of a published trace, computed from its file. Prompts and outputs are independent: the
    correlation of their logarithms was below 0.1 in each.

    Attributes:
        burstiness: shape of a gamma distribution of the times between requests, with the median variation of all
            minutes: 1 is a Poisson process, less are bursts.
        source: repository and file.
    """

    input: LengthStatistics
    output: LengthStatistics
    burstiness: float
    source: str


TRACES: Registry[TraceStatistics] = Registry("trace")
TRACES.register("azure-conversation")(
    TraceStatistics(
        LengthStatistics((2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6179, 14050)),
        LengthStatistics((7, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000)),
        0.958,
        "Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv (2023)",
    )
)
TRACES.register("azure-code")(
    TraceStatistics(
        LengthStatistics((3, 75, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437, 7437)),
        LengthStatistics((6, 6, 7, 9, 13, 24, 55, 90, 251, 825, 1899)),
        0.0973,
        "Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_code.csv (2023)",
    )
)
TRACES.register("mooncake-conversation")(
    TraceStatistics(
        LengthStatistics((891, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400, 121301, 126195)),
        LengthStatistics((1, 10, 24, 156, 350, 472, 597, 698, 1119, 2000, 2000)),
        1.0,  # its times are rounded to three seconds, so they say nothing about shorter ones
        "kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
    )
)


class Lengths(Protocol):
    """Distribution of a number of tokens."""

    def draw(self, generator: random.Random) -> int:
        """Returns a number of tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Distributions of requests.

    Attributes:
        prefix: tokens that all prompts begin with.
        burstiness: shape of the gamma distribution of the times between requests; 1 is a Poisson process.
        scale: factor on drawn lengths, for models of a shorter context.
    """

    input: Lengths
    output: Lengths
    num_requests: int
    prefix: int = 0
    burstiness: float = 1.0
    scale: float = 1.0
    seed: int = 0


def make_jobs(workload: Workload) -> list[Job]:
    """Returns requests that arrive at one a second on average, with gamma-distributed times between them."""
    generator, prefix = random.Random(f"{workload.seed}/requests"), workload.prefix
    shape = workload.burstiness
    gaps = (generator.gammavariate(shape, 1 / shape) for _ in range(workload.num_requests - 1))
    jobs = []
    for number, at in enumerate(list(accumulate(gaps, initial=0.0))):
        drawn = (each.draw(generator) for each in (workload.input, workload.output))
        prompt, output = (_scaled(tokens, workload.scale) for tokens in drawn)
        pieces = (Piece(0, prefix), Piece(number + 1, prompt)) if prefix else ()
        jobs.append(Job(str(number), at, prefix + prompt, output, pieces))
    return jobs


def at_rate(jobs: Sequence[Job], rate: float) -> list[Job]:
    """Returns the jobs with times scaled to an average number of requests per second."""
    factor = native_rate(jobs) / rate
    return [replace(job, at=job.at * factor) for job in jobs]


def native_rate(jobs: Sequence[Job]) -> float:
    """Returns the average number of requests per second."""
    return (len(jobs) - 1) / jobs[-1].at if len(jobs) > 1 and jobs[-1].at else 1.0


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(scale * tokens))


def read_trace(file: Path, scale: float = 1.0) -> list[Job]:
    """Reads a trace: JSON lines as Mooncake's (`timestamp` in milliseconds, `input_length`, `output_length`, and
    optional `hash_ids` of blocks of 512 tokens), or CSV as that of Azure or BurstGPT.

    Args:
        scale: factor on lengths.

    Raises:
        DataError: there is no such file, or a row lacks a field or has another value.
    """
    if not file.is_file():
        raise DataError(f"there is no trace {file}", f"Name a file, or statistics: {', '.join(TRACES)}")
    if file.suffix == ".csv":
        with file.open(encoding="utf-8", newline="") as lines:
            rows = [(f"{file}:{number}", row) for number, row in enumerate(csv.DictReader(lines), 2)]
    else:
        rows = list(json_lines(file))
    jobs = [job for number, (place, row) in enumerate(rows) if (job := _job(place, row, str(number), scale))]
    if not jobs:
        raise DataError(f"{file} has no requests", "Write a line for each")
    first = min(job.at for job in jobs)
    return sorted((replace(job, at=job.at - first) for job in jobs), key=lambda job: job.at)


FIELDS = (
    ("timestamp", "input_length", "output_length"),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)
"""Names of the time, the prompt's tokens and the output's tokens, in the formats of Mooncake, Azure and BurstGPT."""


def _job(place: str, row: Any, name: str, scale: float) -> Job | None:
    """Returns the request of a row; None for one without an answer."""
    try:
        keys = next(keys for keys in FIELDS if set(keys) <= row.keys())
        at, prompt, output = (row[key] for key in keys)
        if not int(prompt) or not int(output):
            return None
        seconds = at / 1000 if keys is FIELDS[0] else _seconds(at)
        num_tokens = _scaled(int(prompt), scale)
        blocks = tuple(int(each) for each in row.get("hash_ids", ()))
    except (StopIteration, AttributeError, TypeError, ValueError) as error:
        remedy = 'Write {"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS}'
        raise DataError(f"{place} is not a request of a trace", remedy) from error
    return Job(name, seconds, num_tokens, _scaled(int(output), scale), _pieces(blocks, num_tokens, scale))


def _seconds(text: str) -> float:
    """Returns seconds of a number, or of a date and time."""
    return datetime.fromisoformat(text[:26]).timestamp() if "-" in text else float(text)


def _pieces(blocks: Sequence[int], num_tokens: int, scale: float) -> tuple[Piece, ...]:
    size, pieces = _scaled(TRACE_BLOCK, scale), []
    for place, block in enumerate(blocks):
        rest = num_tokens - place * size
        if rest > 0:
            # The last block takes what rounding leaves.
            pieces.append(Piece(block, rest if place == len(blocks) - 1 else min(size, rest)))
    return tuple(pieces)
