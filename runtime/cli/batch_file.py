"""Batch files: requests `{"custom_id", "method", "url", "body"}`, results, and the batch run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

from compress.common.errors import DataError
from compress.common.files import utf8_text

if TYPE_CHECKING:
    from fastapi import FastAPI
    from httpx import Response


URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch file."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path, model_name: str) -> Iterator[Line | str]:
    """Yields requests in order, and an error with the line number for every invalid line. Reads lazily.

    Args:
        model_name: model name that the bodies must have.

    Raises:
        DataError: the file does not exist or is not UTF-8.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}", "Name a file of JSON lines in OpenAI's batch format")
    first_lines: dict[str, int] = {}
    with utf8_text(path), path.open(encoding="utf-8-sig") as lines:  # some editors begin it with a byte order mark
        for number, text in enumerate(lines, 1):
            if text.strip():
                line = _parse(number, text, model_name)
                yield f"{path}:{number}: {line}" if isinstance(line, str) else _unless_seen(line, first_lines, path)


def _unless_seen(line: Line, first_lines: dict[str, int], path: Path) -> Line | str:
    first = first_lines.setdefault(line.custom_id, line.number)
    if first == line.number:
        return line
    return f"{path}:{line.number}: custom_id {line.custom_id!r} is used in line {first} already; make it unique"


def _parse(number: int, text: str, model_name: str) -> Line | str:
    """Returns the request, or an error."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(entry, dict):
        return "not a JSON object"
    missing = [name for name in FIELDS if name not in entry]
    unknown = sorted(entry.keys() - set(FIELDS))
    if missing or unknown:
        return f"lacks {', '.join(missing)}" if missing else f"has the unknown field {unknown[0]!r}"
    problem = _problem(entry, model_name)
    return problem or Line(number, entry["custom_id"], entry["url"], entry["body"])


def _problem(entry: dict[str, Any], model_name: str) -> str:
    body = entry["body"]
    if not isinstance(entry["custom_id"], str) or not entry["custom_id"]:
        return f"custom_id {entry['custom_id']!r} is not a non-empty string"
    if entry["method"] != "POST":
        return f"method {entry['method']!r} is not POST"
    if entry["url"] not in URLS:
        return f"url {entry['url']!r} is none of {', '.join(URLS)}"
    if not isinstance(body, dict):
        return "body is not a JSON object"
    if body.get("stream"):
        return "body has stream=true; answers in a file are not streamed"
    if body.get("model") != model_name:
        return f"model {body.get('model')!r} is not the loaded one, {model_name!r}; --served-model-name sets the name"
    return ""


BEGINNING = b'{"id":"batch_req_'
"""Start of every line this class writes; other incomplete lines are not removed."""


class ResultFile:
    """Appends results to a file and knows the statuses of the requests in it.

    An incomplete last line, which a killed run may leave, is removed when the file is opened.

    Raises:
        DataError: a line of the file is not a result (names its number); the file is not changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_new = not path.exists()
        self.statuses, num_bytes = ({}, 0) if self._is_new else _read_statuses(path)
        self._stream: BinaryIO = path.open("ab")
        self._stream.truncate(num_bytes)

    def write(self, custom_id: str, answer: Response) -> None:
        """Appends one result. After a crash its line is complete or recognizably incomplete."""
        line = json.dumps(result_json(custom_id, answer), separators=(",", ":"))
        self._stream.write(line.encode() + b"\n")
        self._stream.flush()
        self.statuses[custom_id] = answer.status_code

    def close(self) -> None:
        """Flushes to disk and closes the file; removes it if it is new and nothing was written."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        if self._is_new and not self.statuses:
            self.path.unlink()


def result_json(custom_id: str, answer: Response) -> dict[str, Any]:
    """Returns one result in OpenAI's format. `error` is for requests that were not run, which are not written."""
    response = {
        "status_code": answer.status_code,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": answer.json(),
    }
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}


def _read_statuses(path: Path) -> tuple[dict[str, int], int]:
    """Returns the statuses by custom id in the complete lines of a file, and the bytes of those lines."""
    statuses: dict[str, int] = {}
    num_bytes = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n") and (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
                break
            try:
                result = json.loads(line)
                statuses[result["custom_id"]] = result["response"]["status_code"]
            except (ValueError, KeyError, TypeError) as error:
                remedy = "Name another file for the results; this one was not changed"
                raise DataError(f"{path}:{number} is not a result of a batch", remedy) from error
            num_bytes += len(line)
    return statuses, num_bytes


BASE_URL = "http://127.0.0.1"
HEADERS = {"content-type": "application/json"}
SECONDS_BETWEEN_LINES = 10.0
OK = 200


@dataclass
class Progress:
    """Progress on standard error: updated in place on a terminal, else a line every few seconds.

    Attributes:
        total: requests in the file.
        skipped: requests that an earlier run answered.
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
    """A batch file and its result files.

    Attributes:
        failures: file for answers with a status other than 200; may be `results`.
        num_at_once: maximum number of requests in flight.
    """

    source: Path
    model_name: str
    results: ResultFile
    failures: ResultFile
    num_at_once: int

    def pending(self) -> Iterator[Line]:
        """Yields the requests without a result, read lazily."""
        for line in read_lines(self.source, self.model_name):
            if isinstance(line, Line) and not self.is_done(line.custom_id):
                yield line

    def is_done(self, custom_id: str) -> bool:
        return custom_id in self.results.statuses or custom_id in self.failures.statuses


async def answer_all(app: FastAPI, batch: Batch, progress: Progress) -> None:
    """Sends every pending request to the application and writes answers in order of completion. Cancelling loses only
    requests in flight."""
    from httpx import ASGITransport, AsyncClient

    pending = batch.pending()

    async def work() -> None:
        for line in pending:
            # In ASCII: JSON may contain half of a surrogate pair, which UTF-8 cannot encode.
            answer = await client.post(line.url, content=json.dumps(line.body).encode("ascii"), headers=HEADERS)
            (batch.results if answer.status_code == OK else batch.failures).write(line.custom_id, answer)
            progress.note(answer.status_code)

    transport = ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        AsyncClient(transport=transport, base_url=BASE_URL, timeout=None) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(batch.num_at_once):
            group.create_task(work())
