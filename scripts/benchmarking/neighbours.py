"""Waits between the tokens of one client while another one, at another address, sends long prompts.

A server, the client that streams, and the other one each have a process of their own. A wait is what the client sees:
the time between two chunks of a stream, with all that the server does meanwhile. The prompt tokens per second are those
of requests that were answered. The first touch of a page of memory for keys and values takes a system milliseconds, so
the other client runs for a while first.

    python scripts/bench_serve.py neighbours
    python scripts/bench_serve.py neighbours --serve "--max-itl 0"      # whole steps, whoever waits
    python scripts/bench_serve.py neighbours --rows "alone" "64 prompts at once" --seconds 30
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarking.machine import open_console
from benchmarking.tables import Row, print_with_markdown
from compress.common.cli import demo_model_path
from runtime.bench.load import Job, Record
from runtime.bench.run import Client, find_model, open_session, run_server

OTHER_ADDRESS = "127.0.0.2"
SETTLING_SECONDS = 2.0
PROMPT_IDS = range(100, 1000)
"""Token ids of prompts, which are made up; no two prompts share a prefix."""


@dataclass(frozen=True)
class Neighbour:
    """Requests of the other client.

    Attributes:
        at_once: requests in flight.
        fields: fields of the body, besides the prompt.
    """

    at_once: int
    path: str = "/v1/completions"
    fields: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 1})

    def body(self, model: str, token_ids: list[int]) -> dict[str, Any]:
        name = "input" if self.path == "/v1/embeddings" else "prompt"
        return {"model": model, name: token_ids, **self.fields}


NEIGHBOURS: Mapping[str, Neighbour | None] = {
    "alone": None,
    "one prompt after the other": Neighbour(1),
    "64 prompts at once": Neighbour(64),
    "prompt_logprobs": Neighbour(8, fields={"max_tokens": 1, "prompt_logprobs": 20}),
    "echo and logprobs": Neighbour(8, fields={"max_tokens": 0, "echo": True, "logprobs": 5}),
    "embeddings": Neighbour(8, "/v1/embeddings", {}),
}
SENT_ALONE = "64 prompts at once"
"""Whose prompt tokens per second are measured without the client that streams, too."""


def flood(url: str, model: str, neighbour: Neighbour, length: int, num_answered: Synchronized) -> None:
    """Sends prompts of `length` tokens until the process is killed, and counts answers. Raises for any refusal."""
    asyncio.run(_flood(url, model, neighbour, length, num_answered))


async def _flood(url: str, model: str, neighbour: Neighbour, length: int, num_answered: Synchronized) -> None:
    connector = aiohttp.TCPConnector(local_addr=(OTHER_ADDRESS, 0), limit=0)
    generator = random.Random(0)

    async def work() -> None:
        while True:
            body = neighbour.body(model, generator.choices(PROMPT_IDS, k=length))
            async with session.post(url + neighbour.path, json=body) as response:
                response.raise_for_status()
                await response.read()
            num_answered.value += 1

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        for _ in range(neighbour.at_once):
            group.create_task(work())


@contextmanager
def flooding(url: str, model: str, neighbour: Neighbour | None, length: int) -> Iterator[Synchronized]:
    """Runs the other client; yields its count of answers, after the first.

    Raises:
        RuntimeError: its requests are refused.
    """
    context = multiprocessing.get_context("spawn")
    answered = context.Value("q", 0)
    if neighbour is None:
        yield answered
        return
    process = context.Process(target=flood, args=(url, model, neighbour, length, answered), daemon=True)
    process.start()
    try:
        while not answered.value:
            if not process.is_alive():
                raise RuntimeError("the requests of the other client are refused")
            time.sleep(0.05)
        time.sleep(SETTLING_SECONDS)
        yield answered
    finally:
        process.kill()
        process.join()


async def stream(url: str, num_tokens: int, seconds: float) -> list[Record]:
    """Sends short prompts one after the other for some time, each answered by a stream of `num_tokens` tokens."""
    records: list[Record] = []
    async with open_session() as session:
        client = Client(session, url, await find_model(session, url))
        while client.now < seconds:
            fields = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
            prompt = random.Random(len(records)).choices(PROMPT_IDS, k=16)
            records.append(await client.send(Job("/v1/completions", {"prompt": prompt, **fields})))
            if records[-1].error:
                raise RuntimeError(records[-1].error)
    return records


def row(name: str, records: Sequence[Record], prompt_rate: float) -> Row:
    gaps = sorted(gap for record in records for gap in record.gaps)
    return {
        "beside": name,
        "streams": str(len(records)),
        "a stream, s": f"{median(record.e2e for record in records):.2f}" if records else "",
        "first token, ms": f"{1e3 * median(record.ttft for record in records):.0f}" if records else "",
        **{
            f"{title}, ms": f"{1e3 * gaps[int(share * (len(gaps) - 1))]:.1f}" if gaps else ""
            for title, share in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))
        },
        "its prompt tokens/s": f"{prompt_rate:,.0f}" if prompt_rate else "",
    }


def measure(url: str, name: str, options: argparse.Namespace) -> Row:
    """Measures streams while the other client sends its requests."""
    model = asyncio.run(_model_of(url))
    with flooding(url, model, NEIGHBOURS[name], options.prompt) as answered:
        began, before = time.perf_counter(), answered.value
        records = asyncio.run(stream(url, options.tokens, options.seconds))
        rate = (answered.value - before) * options.prompt / (time.perf_counter() - began)
    return row(name, records, rate)


def measure_prompts(url: str, seconds: float, length: int) -> Row:
    """Measures the prompt tokens per second of the other client when nothing else runs."""
    with flooding(url, asyncio.run(_model_of(url)), NEIGHBOURS[SENT_ALONE], length) as answered:
        began, before = time.perf_counter(), answered.value
        time.sleep(seconds)
        rate = (answered.value - before) * length / (time.perf_counter() - began)
    return row(f"{SENT_ALONE}, no stream", [], rate)


async def _model_of(url: str) -> str:
    async with open_session() as session:
        return await find_model(session, url)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of each prompt of the other client")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each row")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds of prompts before the first row")
    parser.add_argument("--serve", default="", help="options of the server, such as '--max-itl 0'")
    parser.add_argument("--rows", nargs="+", choices=NEIGHBOURS, default=list(NEIGHBOURS))


def run(options: argparse.Namespace) -> int:
    console = open_console()
    with run_server(options.model, shlex.split(options.serve)) as server:
        measure_prompts(server.url, options.warm_up, options.prompt)
        rows = [measure(server.url, name, options) for name in options.rows]
        rows.append(measure_prompts(server.url, options.seconds, options.prompt))
    title = f"Waits between tokens of one client while another sends prompts of {options.prompt} tokens"
    print_with_markdown(title, rows, console)
    return 0
