"""Documents through the `datasets` library: by name, or from a folder that `save_to_disk` wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.documents import FIELDS, Document, document_of, no_document
from compress.checkpoint.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

DEFAULT_SPLIT = "train"
_MARKS = ("dataset_dict.json", "state.json")


def read_named_dataset(spec: str) -> Iterator[Document]:
    """Documents of `name[:config[:split]]`, from the network or from the library's cache.

    Raises:
        DataError: it cannot be loaded, or its rows hold no documents.
    """
    name, config, split = [*spec.split(":"), "", ""][:3]
    try:
        from datasets import DownloadConfig, load_dataset

        options = DownloadConfig(max_retries=1)
        with _quiet("huggingface_hub"):
            rows = load_dataset(name, config or None, split=split or DEFAULT_SPLIT, download_config=options)
    # The library and the network below it raise many unrelated types; all of them mean the same to a user.
    except Exception as error:
        problem = f"{spec!r} is neither a file here nor a dataset that could be loaded ({_first_line(error)})"
        remedy = "Give a .txt, .jsonl or .parquet file, a dataset saved with save_to_disk, or bundled or pydoc"
        raise DataError(problem, remedy) from error
    return _documents(rows, spec)


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((path / mark).is_file() for mark in _MARKS)


def read_saved_dataset(path: Path) -> Iterator[Document]:
    """Documents of a saved dataset; of its `train` split when it has several. Raises DataError."""
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(path)
    except Exception as error:  # As above: any of many types.
        raise DataError(f"{path} is no dataset that can be loaded ({_first_line(error)})", "Save it again") from error
    if isinstance(rows, DatasetDict):
        if DEFAULT_SPLIT not in rows:
            choices = " or ".join(str(path / split) for split in rows)
            raise DataError(f"{path} has no split {DEFAULT_SPLIT!r}", f"Name one: {choices}")
        rows = rows[DEFAULT_SPLIT]
    return _documents(rows, str(path))


def _documents(rows: Dataset, name: str) -> Iterator[Document]:
    column = next((field for field in FIELDS if field in rows.column_names), None)
    if column is None:
        raise no_document(name, rows.column_names)
    return (document_of(row, f"{name} row {number}") for number, row in enumerate(rows.select_columns(column), 1))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
