"""Load generator: workloads, an HTTP client that records times, and closed or open arrival of requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from compress.common.errors import DataError, ToolkitError
from compress.common.files import json_lines

FAILURES = (aiohttp.ClientError, OSError, ValueError)
"""Raised when there is no connection, an answer breaks off, or it is not HTTP or not JSON."""


def server_address(url: str) -> str:
    """Returns `http://host:port` of a URL with or without a path and a final `/v1`. Raises ToolkitError for anything
    else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ToolkitError(f"{url!r} is not a URL of a server", "Write for example --url http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yields the data of server-sent events, each as soon as it is complete."""
    rest = b""
    async for piece in response.content.iter_any():
        *complete, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in complete:
            if event.startswith(b"data:"):
                yield event.removeprefix(b"data:").strip()


def open_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """Opens a session with one connection per request and no limit on their number."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    )


async def fetch_json(session: aiohttp.ClientSession, method: str, url: str, payload: Any = None) -> Any:
    """Fetches the JSON of a whole answer. Raises ToolkitError without a server, or for another status than 200."""
    parts = urlsplit(url)
    try:
        async with session.request(method, url, json=payload, allow_redirects=False) as response:
            status, body = response.status, await response.read()
    except FAILURES as error:
        raise ToolkitError(f"no answer from {parts.netloc}: {error}", "Start the server, or correct --url") from error
    if status != 200:
        detail = body[:200].decode(errors="replace")
        raise ToolkitError(f"{method} {parts.path} on {parts.netloc} gave status {status}: {detail}", "Check --api-key")
    return json.loads(body)


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


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its route, and its body without the fields that all bodies share."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of a run.

    Attributes:
        input: prompt tokens of a request after the shared prefix.
        output: tokens of an answer; exact, because end tokens are ignored.
        shared_prefix: tokens at the start of every prompt, the same for all.
        seed: seed of lengths, texts and arrivals.
    """

    input: Lengths
    output: Lengths
    num_requests: int
    shared_prefix: int = 0
    temperature: float = 0.0
    seed: int = 0

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


@dataclass(slots=True)
class Client:
    """Sends jobs to one server and records times on one clock.

    Attributes:
        session: its connections.
        address: `http://host:port` and the path before `/v1`.
        model: name of the model on the server.
        timeout: seconds for a whole request.
    """

    session: aiohttp.ClientSession
    address: str
    model: str
    timeout: float = 600.0
    began: float = field(default_factory=time.perf_counter)
    num_active: int = 0
    peak_active: int = 0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    async def send(self, job: Job, start: float | None = None) -> Record:
        """Sends one streamed request and returns its record; failures are recorded, never raised."""
        record = Record(self.now if start is None else start)
        self.num_active += 1
        self.peak_active = max(self.peak_active, self.num_active)
        try:
            async with asyncio.timeout(self.timeout):
                await self._stream(job, record)
        except TimeoutError:
            record.error = f"no complete answer within {self.timeout:g} s"
        except FAILURES as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            self.num_active -= 1
            record.end = self.now
        return record

    async def _stream(self, job: Job, record: Record) -> None:
        body = {**job.body, "model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        async with self.session.post(self.address + job.path, json=body, allow_redirects=False) as response:
            record.status = response.status
            if response.status != 200:
                record.error = _error_message(await response.read())
                return
            await self._read(response, record)
        if not record.chunk_times:  # tokens without text, such as end tokens: they arrived by now
            record.chunk_times.append(self.now)

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        async with aclosing(events(response)) as received:
            async for data in received:
                now = self.now
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    record.error = str(chunk["error"].get("message", chunk["error"]))
                    return
                if _has_text(chunk):
                    record.chunk_times.append(now)
                if chunk.get("usage"):
                    _note_usage(record, chunk["usage"])
        record.error = "the stream broke off"


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk["choices"])


def _note_usage(record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens = usage["prompt_tokens"]
    record.output_tokens = usage["completion_tokens"]
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _error_message(body: bytes) -> str:
    """Returns the message of an OpenAI error object, or the start of any other body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


Progress = Callable[[Record], None]


async def closed_loop(client: Client, jobs: Sequence[Job], concurrency: int, progress: Progress) -> list[Record]:
    """Sends jobs from `concurrency` clients, each the next one when its last answer is complete."""
    waiting = iter(jobs)
    records: list[Record] = []

    async def work() -> None:
        for job in waiting:
            records.append(await client.send(job))
            progress(records[-1])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(work())
    return records


async def open_loop(client: Client, jobs: Sequence[Job], arrivals: Sequence[float], progress: Progress) -> list[Record]:
    """Sends each job at its time, independent of the number in flight.

    Latencies count from the due time of a request, so a late generator hides nothing.

    Args:
        arrivals: seconds from now, in order, one per job.
    """
    begin = client.now

    async def send(job: Job, due: float) -> Record:
        await asyncio.sleep(due - client.now)
        record = await client.send(job, due)
        progress(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(job, begin + at)) for job, at in zip(jobs, arrivals, strict=True)]
    return [task.result() for task in tasks]
