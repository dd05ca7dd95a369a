"""A benchmark run: finds the model, makes jobs, warms up, applies the load, summarizes."""

from __future__ import annotations

import asyncio
import ctypes
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aiohttp import ClientSession

from compress.common.errors import ToolkitError
from runtime.bench.figures import Objective, Run, summarize
from runtime.bench.load import (
    Client,
    Job,
    Record,
    Workload,
    closed_loop,
    fetch_json,
    open_loop,
    open_session,
    python_manual,
    server_address,
)
from runtime.text.tokenizer import Tokenizer

WARM_UP_SEED = 1
MANUAL_CHARACTERS = 600_000


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop with `concurrency` clients, or open loop with `rate` requests per second."""

    concurrency: int = 1
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is None:
            return f"closed loop, concurrency {self.concurrency}"
        return f"open loop, {self.rate:g} requests/s"


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
        model = await find_model(session, address)
        warm_up, jobs = await make_jobs(plan, session, address, model)
        await _warm_up(Client(session, address, model, plan.timeout), warm_up, plan.load.concurrency)
        client = Client(session, address, model, plan.timeout)
        records = await _load(client, plan, jobs)
    figures = summarize(records, client.peak_active, plan.objectives)
    return Run(plan.command, url, model, str(plan.load), plan.workload, plan.objectives, records, figures)


async def find_model(session: ClientSession, address: str) -> str:
    """Returns the first model that the server lists."""
    models = (await fetch_json(session, "GET", f"{address}/v1/models"))["data"]
    if not models:
        raise ToolkitError("the server lists no model", "Check --url")
    return models[0]["id"]


async def make_jobs(plan: Plan, session: ClientSession, address: str, model: str) -> tuple[list[Job], list[Job]]:
    """Returns jobs for the warm-up and for the measurement."""
    if plan.prompts is not None:
        jobs = plan.workload.from_prompts(plan.prompts)
        return jobs[: plan.num_warm_up], jobs
    text = python_manual()[:MANUAL_CHARACTERS]
    if plan.tokenizer_path is not None:
        token_ids = Tokenizer.open(plan.tokenizer_path).encode(text, add_special_tokens=False)
    else:
        token_ids = await _tokenize_there(session, address, model, text)
    warm_up = plan.workload.from_text(token_ids, plan.num_warm_up, WARM_UP_SEED)
    return warm_up, plan.workload.from_text(token_ids)


async def _tokenize_there(session: ClientSession, address: str, model: str, text: str) -> list[int]:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        return (await fetch_json(session, "POST", f"{address}/tokenize", body))["tokens"]
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
            return await closed_loop(client, jobs, plan.load.concurrency, progress)
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
    return asyncio.run(measure(plan, url, api_key))


READY = re.compile(r"^serving .* at (http://\S+)")
SECONDS_TO_STOP = 10
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux' prctl."""


@contextmanager
def own_server(model: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Runs `runtime serve MODEL` on a free port; yields its URL and stops it at the end.

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
            yield _wait_until_ready(server, log)
        finally:
            _stop(server)


def _wait_until_ready(server: subprocess.Popen[str], log: IO[str]) -> str:
    for line in server.stdout or ():
        if match := READY.match(line):
            return match[1]
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
