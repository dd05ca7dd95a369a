"""Result files: one whole line per answered request, in order of completion. A killed run can go on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from compress.checkpoint.errors import DataError
from runtime.batch_file.app_client import Answer

BEGINNING = b'{"id":"batch_req_'
"""Of every line written here; what does not begin so is not ours to cut off."""


class ResultFile:
    """Appends results to a file and knows the status of the requests that it holds.

    A last line without its end, which a killed run may leave, is cut off when the file is opened.

    Raises:
        DataError: the file holds something else than results, by line number; it is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.statuses, num_bytes = _read_statuses(path) if path.exists() else ({}, 0)
        self._stream: BinaryIO = path.open("ab")
        self._stream.truncate(num_bytes)

    def write(self, custom_id: str, answer: Answer) -> None:
        """Adds one answer. The line is whole or, after a crash, recognizably broken."""
        line = json.dumps(result_json(custom_id, answer), separators=(",", ":"))
        self._stream.write(line.encode() + b"\n")
        self._stream.flush()
        self.statuses[custom_id] = answer.status

    def close(self) -> None:
        """Makes what was written survive a power cut."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


def result_json(custom_id: str, answer: Answer) -> dict[str, Any]:
    """OpenAI's shape of one result. `error` is for requests that were not run, which are not written at all."""
    response = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": answer.json(),
    }
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}


def _read_statuses(path: Path) -> tuple[dict[str, int], int]:
    """Status by custom id in the whole lines of a file, and how many bytes those lines have."""
    statuses: dict[str, int] = {}
    num_bytes = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n") and _is_beginning(line):
                break
            try:
                result = json.loads(line)
                statuses[result["custom_id"]] = result["response"]["status_code"]
            except (ValueError, KeyError, TypeError) as error:
                remedy = "Name another file for the results; this one is left as it is"
                raise DataError(f"{path}:{number} is not a result of a batch", remedy) from error
            num_bytes += len(line)
    return statuses, num_bytes


def _is_beginning(line: bytes) -> bool:
    return line.startswith(BEGINNING) or BEGINNING.startswith(line)
