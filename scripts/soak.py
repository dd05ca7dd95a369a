"""Memory of a server under long, malformed, aborted and constrained requests.

python scripts/soak.py --minutes 30 --out soak.json
python scripts/soak.py --minutes 5 --model packed/ --seed 1 --clients 4

Starts a server of its own, warms it up, lets it rest, and then sends it random requests (`soak_requests`). Prints its
resident memory per minute and the number of answers by kind and status. Ends with status 1 when a bar is missed:
memory after the soak, its growth during it, a status 500, a traceback in the server's log, or a request without an end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
from benchmarking.machine import environment, leave_with, process_ids
from benchmarking.tables import describe, print_table, write_json
from rich.console import Console
from soak_requests import KINDS, MEBIBYTE, REQUEST_SECONDS, Draw, send

from compress.common.cli import demo_model_path
from runtime.bench.run import OwnServer, fetch_json, open_session, run_server

MOST_RATIO = 1.2
"""Resident memory at rest after the soak, by that at rest before it."""
MOST_GROWTH = 1.2
"""Mean resident memory in the last third of the soak, by that in the first."""

KV_MEMORY = "64MiB"
"""Small enough to be used up in the warm-up: pages of the KV cache become resident when they are first written."""
REST_SECONDS = 15.0
SAMPLE_SECONDS = 0.5
FAILED = {"500", "no answer"}


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
