"""Where text comes from: bundled files, local files, the Python manual, or a named dataset."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from calibration.documents import Document
from calibration.named_dataset import read_named_dataset
from calibration.text_files import TEXT_ENDINGS, read_path
from compress.checkpoint.errors import DataError

DOCUMENT_SEPARATOR = "<|document|>"
NAMED_SOURCES = ("bundled", "pydoc")
SELF = "self"
"""Text that the model itself writes: a source of token sequences, not of documents."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """Documents of one origin.

    Attributes:
        name: what the user wrote: `bundled`, `pydoc`, a path or a dataset name.
        documents: texts, or chats (lists of `{role, content}`) that need a model's template to become text.
        description: origin in words, with versions where they matter.
    """

    name: str
    documents: tuple[Document, ...]
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
            text file, a `.jsonl`, `.jsonl.xz` or `.parquet` file with `text` or `messages` fields, a folder of such
            files or one that `datasets` saved, or a `datasets` name as `name[:config[:split]]`.

    Raises:
        DataError: nothing there, nothing readable, or nothing but white space.
    """
    documents, description = _open(spec)
    source = TextSource(spec, tuple(documents), description)
    if not any(document if isinstance(document, list) else document.strip() for document in source.documents):
        raise DataError(f"{spec} holds no text", "Give a file with text, or leave the option out for the bundled text")
    return source


def _open(spec: str) -> tuple[Iterator[Document], str]:
    path = Path(spec).expanduser()
    if spec == "bundled":
        return _bundled(), "mixed text that ships with the package"
    if spec == "pydoc":
        return _pydoc(), f"pydoc_data.topics of Python {platform.python_version()}"
    if spec == SELF:
        raise DataError("text from the model itself can calibrate but not measure", "Use " + " or ".join(NAMED_SOURCES))
    if spec.partition(":")[0] in (*NAMED_SOURCES, SELF) and not path.exists():
        raise DataError(f"{spec} is one text alone, which takes no weight", f"Write {spec.partition(':')[0]}")
    if not spec:
        raise DataError("no text was named", "Give a file, or one of: " + ", ".join(NAMED_SOURCES))
    if path.exists():
        return read_path(path), f"local text {spec}"
    if spec.endswith((*TEXT_ENDINGS, ".xz")) or spec.startswith((".", "/", "~")):
        raise DataError(
            f"text file {spec} does not exist", "Give an existing file, or one of: " + ", ".join(NAMED_SOURCES)
        )
    return read_named_dataset(spec), f"dataset {spec}"


def _bundled() -> Iterator[str]:
    folder = Path(str(files("calibration") / "data"))
    for path in sorted(folder.glob("*.txt")):
        for document in path.read_text(encoding="utf-8").split(f"{DOCUMENT_SEPARATOR}\n"):
            if document.strip():
                yield document.strip()


def _pydoc() -> Iterator[str]:
    from pydoc_data.topics import topics

    return (topics[key] for key in sorted(topics))
