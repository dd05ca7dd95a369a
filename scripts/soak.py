"""Memory of a server under long, malformed, aborted and constrained requests.

python scripts/soak.py --minutes 30 --out soak.json
python scripts/soak.py --minutes 5 --model packed/ --seed 1 --clients 4

Starts a server of its own, warms it up, lets it rest, and then sends it random requests of the kinds in `KINDS`. Prints
its resident memory per minute and the number of answers by kind and status. Ends with status 1 when a bar is missed:
memory after the soak, its growth during it, a status 500, a traceback in the server's log, or a request without an end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import string
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
from benchmarking.machine import environment, leave_with
from benchmarking.tables import describe, print_table, write_json
from rich.console import Console

from compress.common.cli import demo_model_path
from runtime.bench.run import FAILURES, OwnServer, fetch_json, open_session, run_server

MOST_RATIO = 1.2
"""Resident memory at rest after the soak, by that at rest before it."""
MOST_GROWTH = 1.2
"""Mean resident memory in the last third of the soak, by that in the first."""

KV_MEMORY = "64MiB"
"""Small enough to be used up in the warm-up: pages of the KV cache become resident when they are first written."""
REST_SECONDS = 15.0
SAMPLE_SECONDS = 0.5
REQUEST_SECONDS = 300.0
FAILED = {"500", "no answer"}
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Shot:
    """One request, and how its client behaves."""

    path: str
    content: bytes | None = None
    manner: str = "reads all"


class Draw:
    """Random parts of requests to one model.

    Args:
        context: tokens of the model's context.
        vocab_size: token ids of the model.
    """

    def __init__(self, seed: str, model: str, context: int, vocab_size: int) -> None:
        self.random = random.Random(seed)
        self.model, self.context, self.vocab_size = model, context, vocab_size

    def shot(self) -> tuple[str, Shot]:
        """Returns the name of a kind, and a request of it."""
        name = self.random.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        return name, KINDS[name][1](self)

    def size(self, low: int, high: int) -> int:
        """Draws a size whose logarithm is uniform."""
        return min(high, int(math.exp(self.random.uniform(math.log(low), math.log(high + 1)))))

    def word(self) -> str:
        return "".join(self.random.choices(string.ascii_lowercase, k=self.random.randint(1, 10)))

    def text(self, length: int) -> str:
        """Returns words, or characters from anywhere in Unicode; `length` is in characters."""
        if self.random.random() < 0.3:
            return "".join(map(chr, self.random.choices(range(0x20, 0xD7FF), k=length)))
        some = [self.word() for _ in range(min(2000, length // 6 + 1))]
        return " ".join(self.random.choices(some, k=length // 6 + 1))

    def ids(self, count: int) -> list[int]:
        return self.random.choices(range(self.vocab_size), k=count)

    def fields(self, **given: Any) -> dict[str, Any]:
        """Returns the fields of a short answer, and more."""
        few = {"max_tokens": self.random.randint(1, 24), "temperature": self.random.choice([0, 0.7, 1.5])}
        return {"model": self.model, **few, **given}

    def completion(self, manner: str = "reads all", **given: Any) -> Shot:
        body = self.fields(**{"prompt": self.text(self.size(4, 200)), **given})
        return Shot("/v1/completions", json.dumps(body).encode(), manner)


def mixed(draw: Draw) -> Shot:
    stop, bias = [draw.word()], {str(token): draw.random.uniform(-100, 100) for token in draw.ids(300)}
    options = {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "stop": stop, "logit_bias": bias, "presence_penalty": 0.5}
    chosen = draw.random.sample(sorted(options), 2)
    return draw.completion(stream=draw.random.random() < 0.5, **{name: options[name] for name in chosen})


def whole_context(draw: Draw) -> Shot:
    new = draw.random.randint(1, 8)
    return draw.completion(prompt=draw.ids(draw.size(draw.context // 8, draw.context - new)), max_tokens=new)


def too_long(draw: Draw) -> Shot:
    length = draw.size(10 * draw.context, 3_800_000)
    return draw.completion(prompt=draw.random.choice([draw.text(length // 2), "a" * length, draw.ids(length // 6)]))


def too_large(draw: Draw) -> Shot:
    return Shot("/v1/completions", draw.random.randbytes(draw.size(4 * MEBIBYTE + 1, 8 * MEBIBYTE)))


def malformed(draw: Draw) -> Shot:
    path = draw.random.choice(["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
    body = json.dumps(draw.fields(prompt=draw.text(draw.size(4, 50_000)))).encode()
    depth = draw.size(10, 100_000)
    return Shot(
        path,
        draw.random.choice(
            [
                draw.random.randbytes(draw.size(1, 100_000)),
                body[: draw.random.randrange(len(body))],
                b"[" * depth + b"]" * depth,
                b'{"a":' * depth + b"1" + b"}" * depth,
                json.dumps({draw.word(): draw.text(20) for _ in range(draw.size(1, 20_000))}).encode(),
                json.dumps(draw.fields(prompt=[None, {}, 1.5, draw.word()])).encode(),
            ]
        ),
    )


def tokenized(draw: Draw) -> Shot:
    body = {"prompt": draw.text(draw.size(1000, 1_000_000)), "return_token_strs": draw.random.random() < 0.2}
    return Shot("/tokenize", json.dumps(body).encode())


def detokenized(draw: Draw) -> Shot:
    return Shot("/detokenize", json.dumps({"tokens": draw.ids(draw.size(1000, 500_000))}).encode())


def constrained(draw: Draw) -> Shot:
    names = [draw.word() for _ in range(draw.size(1, 100))]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names[:2]}
    grammar = draw.random.choice(
        [
            {"guided_json": schema},
            {"guided_regex": f"({'|'.join(names)})[0-9]{{1,{draw.size(1, 50)}}}"},
            {"guided_choice": [f"{name} {index}" for index, name in enumerate(names)]},
            {"guided_grammar": f'start: rule | "{names[0]}" start\nrule: {" | ".join(map(json.dumps, names))}'},
            {"guided_regex": f".*[a-m].{{{draw.random.randint(8, 20)}}}{names[0]}"},  # many states of the lexer
            {"guided_regex": "(" * draw.size(1, 1000)},
        ]
    )
    return draw.completion(stream=draw.random.random() < 0.5, **grammar)


def scored(draw: Draw) -> Shot:
    prompt = draw.ids(draw.size(8, draw.context // 2))
    return draw.completion(prompt=prompt, echo=True, logprobs=draw.random.randint(0, 20), n=draw.random.randint(1, 2))


def several(draw: Draw) -> Shot:
    prompts = [draw.text(40) for _ in range(draw.random.randint(1, 4))]
    return draw.completion(prompt=prompts, n=draw.random.randint(2, 8), stream=draw.random.random() < 0.5)


def embedded(draw: Draw) -> Shot:
    inputs = [draw.text(draw.size(8, 400)) for _ in range(draw.size(1, 64))]
    return Shot("/v1/embeddings", json.dumps({"model": draw.model, "input": inputs}).encode())


def chat(draw: Draw) -> Shot:
    turns = [draw.text(draw.size(1, 100)) for _ in range(2 * draw.size(1, 20) + 1)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    parameters = {"type": "object", "properties": {draw.word(): {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": f"f{draw.random.randrange(10**6)}", "parameters": parameters}}]
    choice = draw.random.choice([{}, {"tools": tools}, {"tools": tools, "tool_choice": "required"}])
    body = draw.fields(messages=messages, stream=draw.random.random() < 0.5, **choice)
    return Shot("/v1/chat/completions", json.dumps(body).encode())


def looked_up(draw: Draw) -> Shot:
    return Shot(draw.random.choice(["/health", "/metrics", "/v1/models", "/openapi.json", "/", f"/{draw.word()}"]))


def left(draw: Draw) -> Shot:
    """A client that leaves, or reads slowly: before the answer, at its start, or within the request."""
    manner = draw.random.choice([name for name in MANNERS if name != "reads all"])
    long = draw.ids(draw.size(8, draw.context // 2))
    return draw.completion(
        manner, prompt=long, stream=draw.random.random() < 0.8, max_tokens=draw.size(8, draw.context // 2)
    )


KINDS: Mapping[str, tuple[int, Callable[[Draw], Shot]]] = {
    "completion": (20, mixed),
    "whole context": (4, whole_context),
    "too long": (4, too_long),
    "too large": (2, too_large),
    "malformed": (12, malformed),
    "/tokenize": (4, tokenized),
    "/detokenize": (2, detokenized),
    "constrained": (16, constrained),
    "scored": (4, scored),
    "several": (4, several),
    "embedded": (4, embedded),
    "chat": (10, chat),
    "looked up": (8, looked_up),
    "left": (16, left),
}
"""Weight and maker of each kind of request."""


async def read_all(response: aiohttp.ClientResponse) -> str:
    body = await response.read()
    failed = response.status == 500 or b'"code":"generation_failed"' in body
    return "500" if failed else str(response.status)


async def read_some(response: aiohttp.ClientResponse) -> str:
    await response.content.readany()
    return "left"


async def read_slowly(response: aiohttp.ClientResponse) -> str:
    for _ in range(20):
        if not await response.content.read(64):
            break
        await asyncio.sleep(0.1)
    return "left"


MANNERS: Mapping[str, Callable[[aiohttp.ClientResponse], Awaitable[str]] | None] = {
    "reads all": read_all,
    "reads some": read_some,
    "reads slowly": read_slowly,
    "leaves": None,
    "sends half": None,
}
"""Readers of the answer; None if the client leaves before."""


async def send(session: aiohttp.ClientSession, url: str, shot: Shot) -> str:
    """Sends one request; returns the status of its answer, or how it ended."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            if read := MANNERS[shot.manner]:
                return await _ask(session, url, shot, read)
            return await _leave(url, shot)
    except TimeoutError:
        return "no answer"
    except FAILURES:
        return "disconnected"


async def _ask(
    session: aiohttp.ClientSession, url: str, shot: Shot, read: Callable[[aiohttp.ClientResponse], Awaitable[str]]
) -> str:
    method, headers = ("GET", {}) if shot.content is None else ("POST", {"Content-Type": "application/json"})
    async with session.request(method, url + shot.path, data=shot.content, headers=headers) as response:
        return await read(response)


async def _leave(url: str, shot: Shot) -> str:
    """Closes the connection after half of the request, or all of it."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    content = shot.content or b""
    head = f"POST {shot.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode())
        writer.write(content[: len(content) // 2] if shot.manner == "sends half" else content)
        await writer.drain()
        await asyncio.sleep(0.2)
    finally:
        writer.close()
    return "left"


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of the server and the processes it started in bytes, `seconds` after the start of the soak."""

    seconds: float
    resident: int
    anonymous: int
    threads: int


def read_sample(pid: int, seconds: float) -> Sample:
    """Reads `/proc`. Raises OSError if the server has ended."""
    found = [read_status(pid)]
    for child in process_ids(pid):
        with suppress(OSError):  # it may end meanwhile
            found.append(read_status(child))
    resident, anonymous, threads = (sum(each) for each in zip(*found, strict=True))
    return Sample(seconds, resident << 10, anonymous << 10, threads)


def read_status(pid: int) -> list[int]:
    """Returns resident and anonymous memory in KiB, and the number of threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [int(status.get(name, "0").split()[0]) for name in ("VmRSS", "RssAnon", "Threads")]


def process_ids(parent: int) -> list[int]:
    """Returns the processes that a process and its children started."""
    children: list[int] = []
    for file in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # the thread ended
            children += map(int, file.read_text().split())
    return [*children, *(each for child in children for each in process_ids(child))]


@dataclass(slots=True)
class Soak:
    """A soak and what was measured.

    Attributes:
        start, end: at rest, before and after.
        answers: number of requests by kind and status.
        fresh: before the first request.
    """

    server: OwnServer
    seed: int
    num_clients: int
    fresh: Sample
    start: Sample
    end: Sample
    began: float
    samples: list[Sample] = field(default_factory=list)
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_behind: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, server: OwnServer, seed: int, num_clients: int) -> Soak:
        fresh = read_sample(server.pid, 0.0)
        return cls(server, seed, num_clients, fresh, fresh, fresh, time.monotonic())

    def sample(self) -> Sample:
        return read_sample(self.server.pid, time.monotonic() - self.began)

    async def run(self, warm_up_seconds: float, seconds: float, tell: Callable[[str], None]) -> None:
        """Measures; tells the memory once a minute."""
        async with open_session() as session:
            await self._load(session, "warm-up", warm_up_seconds)
            self.answers.clear()
            self.start = await self._rest(session)
            self.began = time.monotonic()
            watcher = asyncio.create_task(self._watch(tell))
            await self._load(session, "soak", seconds)
            watcher.cancel()
            self.end = await self._rest(session)

    async def _load(self, session: aiohttp.ClientSession, phase: str, seconds: float) -> None:
        """Sends requests from all clients for a time, each the next one when its last has ended."""
        url, end = self.server.url, time.monotonic() + seconds
        model = (await fetch_json(session, "GET", f"{url}/v1/models"))["data"][0]
        vocab_size = (await fetch_json(session, "GET", f"{url}/tokenizer_info"))["vocab_size"]

        async def work(index: int) -> None:
            draw = Draw(f"{self.seed}/{phase}/{index}", model["id"], model["max_model_len"], vocab_size)
            while time.monotonic() < end:
                kind, shot = draw.shot()
                self.answers[kind, await send(session, url, shot)] += 1

        async with asyncio.TaskGroup() as group:
            for index in range(self.num_clients):
                group.create_task(work(index))

    async def _rest(self, session: aiohttp.ClientSession) -> Sample:
        """Waits for the last requests, and then a little longer."""
        limit = time.monotonic() + REQUEST_SECONDS
        while any(await self._unfinished(session)) and time.monotonic() < limit:
            await asyncio.sleep(SAMPLE_SECONDS)
        await asyncio.sleep(REST_SECONDS)
        return self.sample()

    async def _unfinished(self, session: aiohttp.ClientSession) -> tuple[int, int]:
        health = self.left_behind = await fetch_json(session, "GET", f"{self.server.url}/health")
        return health["running"], health["waiting"]

    async def _watch(self, tell: Callable[[str], None]) -> None:
        while True:
            self.samples.append(sample := self.sample())
            minute, before = (each.seconds // 60 for each in (sample, self.samples[-2:][0]))
            if minute > before:
                tell(f"{minute:.0f} minutes: {mebibytes(sample.resident)} MiB, {self.answers.total()} answers")
            await asyncio.sleep(SAMPLE_SECONDS)

    @property
    def ratio(self) -> float:
        return self.end.resident / self.start.resident

    @property
    def growth(self) -> float:
        third = len(self.samples) // 3
        parts = self.samples[:third], self.samples[-third:]
        first, last = (fmean(sample.resident for sample in part) for part in parts)
        return last / first

    @property
    def num_tracebacks(self) -> int:
        log = self.server.log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).count(b"Traceback (most recent call last)")

    def misses(self) -> list[str]:
        """Returns the bars that were missed."""
        failed = sum(count for (_, status), count in self.answers.items() if status in FAILED)
        checks = {
            f"memory at rest is {self.ratio:.2f} of that before, at most {MOST_RATIO}": self.ratio <= MOST_RATIO,
            f"memory grew by {self.growth:.2f}, at most {MOST_GROWTH}": self.growth <= MOST_GROWTH,
            f"{failed} requests failed": not failed,
            f"{self.num_tracebacks} tracebacks in the log": not self.num_tracebacks,
            f"requests did not end: {self.left_behind}": not (
                self.left_behind["running"] or self.left_behind["waiting"]
            ),
        }
        return [text for text, is_met in checks.items() if not is_met]

    def minutes(self) -> list[dict[str, str]]:
        """Returns table rows: memory in each minute."""
        rows = []
        for minute in range(int(self.samples[-1].seconds // 60) + 1):
            within = [sample for sample in self.samples if sample.seconds // 60 == minute]
            anonymous = fmean(sample.anonymous for sample in within)
            residents = [sample.resident for sample in within]
            rows.append(
                {
                    "minute": str(minute + 1),
                    "mean MiB": mebibytes(fmean(residents)),
                    "most MiB": mebibytes(max(residents)),
                    "last MiB": mebibytes(residents[-1]),
                    "anonymous MiB": mebibytes(anonymous),
                    "threads": str(max(sample.threads for sample in within)),
                }
            )
        return rows

    def kinds(self) -> list[dict[str, str]]:
        """Returns table rows: answers of each kind by status."""
        statuses = sorted({status for _, status in self.answers})
        return [
            {"kind": kind, **{status: str(self.answers[kind, status] or "") for status in statuses}} for kind in KINDS
        ]

    def figures(self) -> dict[str, Any]:
        at_rest = {"fresh": self.fresh, "start": self.start, "end": self.end}
        return {
            "seed": self.seed,
            "clients": self.num_clients,
            **{name: asdict(sample) for name, sample in at_rest.items()},
            "peak": max(sample.resident for sample in self.samples),
            "ratio": self.ratio,
            "growth": self.growth,
            "tracebacks": self.num_tracebacks,
            "misses": self.misses(),
            "minutes": self.minutes(),
            "answers": self.kinds(),
        }


def mebibytes(count: float) -> str:
    return f"{count / MEBIBYTE:.0f}"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=2, metavar="MINUTES")
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="default: the bundled demo model")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=120, highlight=False)
    facts = environment()
    console.print(describe(facts))
    with run_server(options.model, ["--kv-memory", KV_MEMORY]) as server:
        soak = Soak.of(server, options.seed, options.clients)
        asyncio.run(soak.run(60 * options.warm_up, 60 * options.minutes, console.print))
        return report(soak, facts, options.out, console)


def report(soak: Soak, facts: Mapping[str, Any], out: Path | None, console: Console) -> int:
    """Prints and writes the figures; returns 1 if a bar was missed."""
    print_table("Resident memory", soak.minutes(), console)
    print_table("Answers by status", soak.kinds(), console)
    names = ("fresh", "start", "peak", "end")
    peak = max(sample.resident for sample in soak.samples)
    sizes = (soak.fresh.resident, soak.start.resident, peak, soak.end.resident)
    console.print(", ".join(f"{name} {mebibytes(size)} MiB" for name, size in zip(names, sizes, strict=True)))
    console.print(f"end / start {soak.ratio:.2f}, last / first third {soak.growth:.2f}")
    if out:
        write_json(out, {"facts": facts, **soak.figures()})
    misses = soak.misses()
    for miss in misses:
        console.print(f"missed: {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    leave_with(main)
