"""Where text comes from: bundled files, local files, the Python manual, or a named dataset."""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from compress.checkpoint.errors import DataError

DOCUMENT_SEPARATOR = "<|document|>"
NAMED_SOURCES = ("bundled", "pydoc")
TEXT_ENDINGS = (".txt", ".md", ".jsonl", ".jsonl.xz")

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class TextSource:
    """Documents of one origin.

    Attributes:
        name: what the user wrote: `bundled`, `pydoc`, a path or a dataset name.
        documents: texts, or chats (lists of `{role, content}`) that need a model's template to become text.
        description: origin in words, with versions where they matter.
    """

    name: str
    documents: tuple[str | Messages, ...]
    description: str

    @property
    def sha256(self) -> str:
        """Hash of all documents in order; equal sources have equal hashes."""
        digest = hashlib.sha256()
        for document in self.documents:
            text = document if isinstance(document, str) else json.dumps(document, sort_keys=True)
            digest.update(text.encode())
            digest.update(b"\0")
        return digest.hexdigest()


def load_texts(spec: str) -> TextSource:
    """Reads the documents that `spec` names.

    Args:
        spec: `bundled` (mixed text that ships with the package), `pydoc` (the Python manual inside every CPython), a
            `.txt`, `.md`, `.jsonl` or `.jsonl.xz` file with `text` or `messages` fields, a folder of such files, or a
            `datasets` name as `name[:config[:split]]`.

    Raises:
        DataError: nothing there, nothing readable, or nothing but white space.
    """
    if spec == "bundled":
        source = _bundled()
    elif spec == "pydoc":
        source = _pydoc()
    elif Path(spec).exists():
        source = TextSource(spec, tuple(_read_path(Path(spec))), f"local text {spec}")
    elif spec.endswith((".txt", ".md", ".jsonl", ".xz")) or spec.startswith((".", "/", "~")):
        raise DataError(
            f"text file {spec} does not exist", "Give an existing file, or one of: " + ", ".join(NAMED_SOURCES)
        )
    else:
        source = _named_dataset(spec)
    if not any(document if isinstance(document, list) else document.strip() for document in source.documents):
        raise DataError(f"{spec} holds no text", "Give a file with text, or leave the option out for the bundled text")
    return source


def _bundled() -> TextSource:
    folder = Path(str(files("calibration") / "data"))
    documents = [
        document.strip()
        for path in sorted(folder.glob("*.txt"))
        for document in path.read_text(encoding="utf-8").split(f"{DOCUMENT_SEPARATOR}\n")
    ]
    return TextSource("bundled", tuple(filter(None, documents)), "mixed text that ships with the package")


def _pydoc() -> TextSource:
    from pydoc_data.topics import topics

    description = f"pydoc_data.topics of Python {platform.python_version()}"
    return TextSource("pydoc", tuple(topics[key] for key in sorted(topics)), description)


def _read_path(path: Path) -> Iterator[str | Messages]:
    if path.is_dir():
        names = sorted(
            child for child in path.rglob("*") if child.name.endswith((".txt", ".md", ".jsonl", ".jsonl.xz"))
        )
        if not names:
            raise DataError(f"folder {path} holds no .txt, .md, .jsonl or .jsonl.xz file", "Name the file itself")
        for child in names:
            yield from _read_path(child)
    elif path.name.endswith((".jsonl", ".jsonl.xz")):
        yield from _read_json_lines(path)
    else:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", "Convert it to UTF-8"
            ) from None


def _read_json_lines(path: Path) -> Iterator[str | Messages]:
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number} is not JSON: {error.msg}", "Write one JSON object per line") from None
            yield _document(record, f"{path}:{number}")


def _document(record: object, place: str) -> str | Messages:
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return record["text"]
        messages = record.get("messages")
        if isinstance(messages, list) and all(map(_is_message, messages)):
            return messages
    raise DataError(f"{place} has neither a `text` string nor a `messages` list", "Give each record one of the two")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _named_dataset(spec: str) -> TextSource:
    name, config, split = [*spec.split(":"), "", ""][:3]
    try:
        from datasets import DownloadConfig, load_dataset

        options = DownloadConfig(max_retries=1)
        with _quiet("huggingface_hub"):
            rows = load_dataset(name, config or None, split=split or "train", download_config=options)
    # The library and the network below it raise many unrelated types; all of them mean the same to a user.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        problem = f"{spec!r} is neither a file here nor a dataset that could be loaded ({reason})"
        raise DataError(problem, "Give a .txt or .jsonl file, or one of: " + ", ".join(NAMED_SOURCES)) from error
    return TextSource(spec, tuple(_document(row, f"{spec} row {i}") for i, row in enumerate(rows)), f"dataset {spec}")


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keeps a library's warnings (one for each of its retries) from burying the one line that a refusal is."""
    library = logging.getLogger(logger)
    before = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(before)
