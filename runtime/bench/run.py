"""A benchmark run: an HTTP client that records times, closed and open loops, warm-up, and a server of its own."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import aiohttp

from compress.common.cli import run_coroutine
from compress.common.errors import ToolkitError
from runtime.bench.figures import Objective, Run, summarize
from runtime.bench.load import Job, Load, Record, Workload, python_manual
from runtime.text.tokenizer import Tokenizer

WARM_UP_SEED = 1
MANUAL_CHARACTERS = 600_000


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
                if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk["choices"]):
                    record.chunk_times.append(now)
                if chunk.get("usage"):
                    _note_usage(record, chunk["usage"])
        record.error = "the stream broke off"


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


async def closed_loop(
    client: Client, jobs: Sequence[Job], concurrency: int, progress: Callable[[Record], None]
) -> list[Record]:
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


async def open_loop(
    client: Client, jobs: Sequence[Job], arrivals: Sequence[float], progress: Callable[[Record], None]
) -> list[Record]:
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


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a benchmark.

    Attributes:
        prompts: lines of a prompts file; None uses pieces of the Python manual as token ids.
        tokenizer_path: folder of the served model; None uses the server's `/tokenize`.
        num_warm_up: requests before the measured ones, with other prompts.
    """

    command: str
    workload: Workload
    load: Load
    prompts: Sequence[dict[str, Any]] | None = None
    tokenizer_path: Path | None = None
    num_warm_up: int = 4
    objectives: tuple[Objective, ...] = ()
    timeout: float = 600.0


async def measure(plan: Plan, url: str, api_key: str | None = None) -> Run:
    """Runs a plan against a server.

    Raises:
        ToolkitError: no server, a refusal of everything, or no tokenizer for prompts of exact lengths.
    """
    address = server_address(url)
    async with open_session(api_key) as session:
        first = Client(session, address, await find_model(session, address), plan.timeout)
        warm_up, jobs = await make_jobs(plan, first)
        await _warm_up(first, warm_up, plan.load.num_clients)
        client = Client(session, address, first.model, plan.timeout)
        records = await _load(client, plan, jobs)
    figures = summarize(records, client.peak_active, plan.objectives)
    return Run(plan.command, url, client.model, str(plan.load), plan.workload, plan.objectives, records, figures)


async def find_model(session: aiohttp.ClientSession, address: str) -> str:
    """Returns the first model that the server lists."""
    models = (await fetch_json(session, "GET", f"{address}/v1/models"))["data"]
    if not models:
        raise ToolkitError("the server lists no model", "Check --url")
    return str(models[0]["id"])


async def make_jobs(plan: Plan, client: Client) -> tuple[list[Job], list[Job]]:
    """Returns jobs for the warm-up and for the measurement."""
    if plan.prompts is not None:
        jobs = plan.workload.from_prompts(plan.prompts)
        return jobs[: plan.num_warm_up], jobs
    text = python_manual()[:MANUAL_CHARACTERS]
    if plan.tokenizer_path is not None:
        token_ids = Tokenizer.open(plan.tokenizer_path).encode(text, add_special_tokens=False)
    else:
        token_ids = await _tokenize_there(client, text)
    warm_up = plan.workload.from_text(token_ids, plan.num_warm_up, WARM_UP_SEED)
    return warm_up, plan.workload.from_text(token_ids)


async def _tokenize_there(client: Client, text: str) -> list[int]:
    body = {"model": client.model, "prompt": text, "add_special_tokens": False}
    try:
        return list((await fetch_json(client.session, "POST", f"{client.address}/tokenize", body))["tokens"])
    except ToolkitError as error:
        remedy = "Name the folder of the served model (runtime bench MODEL --url ...), or give --prompts FILE.jsonl"
        raise ToolkitError(f"the server does not tokenize the prompts ({error.problem})", remedy) from error


async def _warm_up(client: Client, jobs: list[Job], concurrency: int) -> None:
    """Runs the warm-up. Raises ToolkitError if all requests fail."""
    if not jobs:
        return
    records = await closed_loop(client, jobs, concurrency, lambda record: None)
    if not any(record.is_complete for record in records):
        remedy = "Check the server and the lengths; --num-warmups 0 skips the warm-up"
        raise ToolkitError(f"every warm-up request failed: {records[0].error.rstrip('.')}", remedy)


async def _load(client: Client, plan: Plan, jobs: list[Job]) -> list[Record]:
    progress = Progress(len(jobs))
    try:
        if plan.load.rate is None:
            return await closed_loop(client, jobs, plan.load.num_clients, progress)
        return await open_loop(client, jobs, plan.workload.arrivals(plan.load.rate), progress)
    finally:
        progress.close()


class Progress:
    """Progress on the standard error of a terminal."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.is_shown = sys.stderr.isatty()

    def __call__(self, record: Record) -> None:
        self.done += 1
        if self.is_shown:
            print(f"\r{self.done}/{self.total} requests", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.is_shown:
            print(file=sys.stderr)


def run(plan: Plan, url: str, api_key: str | None = None) -> Run:
    """Runs `measure` in a new event loop."""
    return run_coroutine(measure(plan, url, api_key))


READY = re.compile(r"^serving .* at (http://\S+)")
SECONDS_TO_STOP = 10
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux' prctl."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server in a process of its own.

    Attributes:
        log: its standard error. Read it by position: the server writes where this file stands.
        printed: lines about the model and the start, up to the one with the URL.
    """

    url: str
    pid: int
    log: IO[str]
    printed: tuple[str, ...]


@contextmanager
def run_server(model: Path, options: Sequence[str] = ()) -> Iterator[OwnServer]:
    """Runs `runtime serve MODEL` on a free port and stops it at the end.

    Args:
        options: further options of `runtime serve`.

    Raises:
        ToolkitError: the server did not start; contains its last message.
    """
    command = [sys.executable, "-m", "runtime.cli", "serve", str(model), "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, preexec_fn=_die_with_parent
        )
        try:
            url, printed = _wait_until_ready(server, log)
            yield OwnServer(url, server.pid, log, printed)
        finally:
            _stop(server)


def _wait_until_ready(server: subprocess.Popen[str], log: IO[str]) -> tuple[str, tuple[str, ...]]:
    printed = list[str]()
    for line in server.stdout or ():
        printed.append(line.rstrip())
        if match := READY.match(line):
            return match[1], tuple(printed)
    server.wait()
    log.seek(0)
    lines = log.read().splitlines() or ["no message"]
    raise ToolkitError(f"the server did not start: {re.sub('^[Ee]rror: ', '', lines[-1])}")


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.communicate(timeout=SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()


def _die_with_parent() -> None:
    """Kills the server if the load generator is killed (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
