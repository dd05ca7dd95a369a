"""Limits of what the steps of a tokenizer.json may do to a text, and errors of the library that runs them: it ends the
process when memory runs out."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from compress.common.errors import CheckpointError, ToolkitError
from compress.common.files import read_json

TOKENIZER_FILE = "tokenizer.json"
COPY_AGAIN = "Copy it from the source model again"
PANIC = "PanicException"
"""Class of the library's errors that it did not foresee: a BaseException that no module exports."""
STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")
MAX_STEPS = 100
MAX_GROWTH = 1000
"""Times that a text may become longer; published tokenizers stay below 20."""
TRIE_ENTRY_BYTES = 4
"""Bytes of an entry of a charsmap's trie, and of the size in front of it."""


class LibraryErrors:
    """Context in which an error of the tokenizers library becomes `kind(f"{problem}: ...", remedy)`."""

    def __init__(self, kind: type[ToolkitError], problem: str, remedy: str) -> None:
        self.kind, self.problem, self.remedy = kind, problem, remedy

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) or (kind is not None and kind.__name__ == PANIC):
            said = " ".join(str(error).split())
            raise self.kind(f"{self.problem}: {said}", self.remedy) from error


def check_tokenizer_file(path: Path) -> None:
    """Reads a tokenizer.json. Raises CheckpointError if it is not valid JSON, or exceeds the limits of this module."""
    content = read_json(path, COPY_AGAIN)
    if problem := _find_excess(content) if isinstance(content, dict) else "it is not a JSON object":
        raise CheckpointError(f"{path} cannot be used: {problem}", COPY_AGAIN)


def _find_excess(content: Mapping[str, Any]) -> str:
    """Returns what is out of bounds in the content of a tokenizer.json; empty if nothing is."""
    found = [step for stage in STAGES for step in _steps(content.get(stage))]
    if len(found) > MAX_STEPS:
        return f"it has {len(found)} steps, and at most {MAX_STEPS} are run"
    growth = math.prod(map(_growth, found))
    if growth > MAX_GROWTH:
        return f"its steps may make a text {growth:.3g} times as long, and at most {MAX_GROWTH} is allowed"
    return next((problem for step in found if (problem := _problem(step))), "")


def _steps(step: object) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a stage, those of a sequence one by one."""
    if not isinstance(step, Mapping):
        return
    inner = next((step[name] for name in CHILDREN if isinstance(step.get(name), list)), None)
    if inner is None:
        yield step
    else:
        for each in inner:
            yield from _steps(each)


def _growth(step: Mapping[str, Any]) -> float:
    """Returns how many times as long a text may become by a step."""
    if step.get("type") == "TemplateProcessing":
        pieces = step.get("single")
        return max(1, sum("Sequence" in piece for piece in pieces)) if isinstance(pieces, list) else 1
    if step.get("type") != "Replace":
        return 1
    pattern = step.get("pattern")
    replaced = len(str(pattern["String"])) if isinstance(pattern, Mapping) and "String" in pattern else 1
    return max(1, len(str(step.get("content", ""))) / max(1, replaced))


def _problem(step: Mapping[str, Any]) -> str:
    if step.get("pattern") == {"String": ""}:
        return f"its step {step.get('type')} looks for an empty text"
    return _charsmap_problem(step["precompiled_charsmap"]) if step.get("precompiled_charsmap") else ""


def _charsmap_problem(encoded: object) -> str:
    """Checks the size in front of the trie, for which the library allocates memory before it reads it."""
    try:
        data = base64.b64decode(str(encoded), validate=True)
    except binascii.Error:
        return "its precompiled_charsmap is not base64"
    size = int.from_bytes(data[:TRIE_ENTRY_BYTES], "little")
    if not 0 < size <= len(data) - TRIE_ENTRY_BYTES or size % TRIE_ENTRY_BYTES:
        return f"its precompiled_charsmap announces a trie of {size} bytes, and has {len(data)}"
    return ""
