"""Answers a batch file with an application in this process, many requests at a time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.batch_file.app_client import post
from runtime.batch_file.lines import Line, read_lines
from runtime.batch_file.results import ResultFile

if TYPE_CHECKING:
    from fastapi import FastAPI

SECONDS_BETWEEN_LINES = 10.0
OK = 200


@dataclass
class Progress:
    """Counts, shown on standard error: in place on a terminal, else a line now and then.

    Attributes:
        total: requests in the file. skipped: those that were answered by an earlier run.
    """

    total: int
    skipped: int
    answered: int = 0
    failed: int = 0
    began: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)

    def note(self, status: int) -> None:
        self.answered += 1
        self.failed += status != OK
        if sys.stderr.isatty():
            print(f"\r{self}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown > SECONDS_BETWEEN_LINES:
            self.shown = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        print(f"{chr(13) if sys.stderr.isatty() else ''}{self}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        rate = self.answered / max(time.monotonic() - self.began, 1e-9)
        done = f"{self.skipped + self.answered} of {self.total} requests done"
        return f"{done} ({self.skipped} by an earlier run, {self.failed} failed), {rate:.1f} requests/s"


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch file and where its answers go.

    Attributes:
        failures: file for answers with another status than 200; may be `results`.
        num_at_once: requests under way together.
    """

    source: Path
    model_name: str
    results: ResultFile
    failures: ResultFile
    num_at_once: int

    def pending(self) -> Iterator[Line]:
        """Requests that no result file holds, read as they are needed."""
        for line in read_lines(self.source, self.model_name):
            if isinstance(line, Line) and not self.is_done(line.custom_id):
                yield line

    def is_done(self, custom_id: str) -> bool:
        return custom_id in self.results.statuses or custom_id in self.failures.statuses


async def answer_all(app: FastAPI, batch: Batch, progress: Progress) -> None:
    """Sends every pending request to the application and writes answers as they come. Cancelling it loses only what is
    under way."""
    pending = batch.pending()

    async def work() -> None:
        for line in pending:
            answer = await post(app, line.url, line.body)
            (batch.results if answer.status == OK else batch.failures).write(line.custom_id, answer)
            progress.note(answer.status)

    async with app.router.lifespan_context(app), asyncio.TaskGroup() as group:
        for _ in range(batch.num_at_once):
            group.create_task(work())
