"""Lines of a batch file: `{"custom_id", "method", "url", "body"}`, checked by number before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.errors import DataError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """One request."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path, model_name: str) -> Iterator[Line | str]:
    """Requests in order, and in place of every wrong line what is wrong with it, with its number. Reads as it goes.

    Args:
        model_name: what the bodies must call the model.

    Raises:
        DataError: there is no such file, or it is not UTF-8.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}", "Name a file of JSON lines in OpenAI's batch format")
    first_lines: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8-sig") as lines:  # some editors begin a file with a byte order mark
            for number, text in enumerate(lines, 1):
                if text.strip():
                    line = _parse(number, text, model_name)
                    yield f"{path}:{number}: {line}" if isinstance(line, str) else _unless_seen(line, first_lines, path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", "Convert it") from error


def _unless_seen(line: Line, first_lines: dict[str, int], path: Path) -> Line | str:
    first = first_lines.setdefault(line.custom_id, line.number)
    if first == line.number:
        return line
    return f"{path}:{line.number}: custom_id {line.custom_id!r} was in line {first} already; make it unique"


def _parse(number: int, text: str, model_name: str) -> Line | str:
    """The request, or what is wrong with it."""
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
        return "body has stream=true; answers in a file are whole"
    if body.get("model") != model_name:
        return f"model {body.get('model')!r} is not the loaded one, {model_name!r}; --name says what to call it"
    return ""
