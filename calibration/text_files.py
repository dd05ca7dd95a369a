"""Documents out of local files: plain text, JSON lines, parquet tables, and folders of them."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

from calibration.documents import FIELDS, Document, document_of, no_document
from calibration.named_dataset import is_saved_dataset, read_saved_dataset
from compress.checkpoint.errors import DataError

JSON_ENDINGS = (".jsonl", ".jsonl.xz")
TABLE_ENDING = ".parquet"
TEXT_ENDINGS = (".txt", ".md", *JSON_ENDINGS, TABLE_ENDING)
_ENDINGS = f"{', '.join(TEXT_ENDINGS[:-1])} or {TABLE_ENDING}"


def read_path(path: Path) -> Iterator[Document]:
    """Documents of a file, of every readable file of a folder in order of name, or of a saved dataset.

    Raises:
        DataError: nothing that can be read, or a record without a document; says file and line.
    """
    try:
        yield from _read(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", "Check the file") from error


def _read(path: Path) -> Iterator[Document]:
    if path.is_dir():
        yield from read_saved_dataset(path) if is_saved_dataset(path) else _read_folder(path)
    elif path.name.endswith(JSON_ENDINGS):
        yield from _read_json_lines(path)
    elif path.name.endswith(TABLE_ENDING):
        yield from _read_table(path)
    else:
        yield _read_text(path)


def _read_folder(path: Path) -> Iterator[Document]:
    names = sorted(child for child in path.rglob("*") if child.name.endswith(TEXT_ENDINGS))
    if not names:
        raise DataError(f"folder {path} holds no {_ENDINGS} file", "Name the file itself")
    for child in names:
        yield from _read(child)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None


def _read_json_lines(path: Path) -> Iterator[Document]:
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield document_of(_parse(line, f"{path}:{number}"), f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None
        except (lzma.LZMAError, EOFError) as error:
            raise DataError(f"{path} is no whole xz file: {error}", "Compress it again with xz") from None


def _parse(line: str, place: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error.msg}", "Write one JSON object per line") from None


def _read_table(path: Path) -> Iterator[Document]:
    """Rows of a parquet file, a batch at a time, and only the column that holds the documents."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as table:
            names = table.schema_arrow.names
            column = next((field for field in FIELDS if field in names), None)
            if column is None:
                raise no_document(str(path), names)
            batches = table.iter_batches(columns=[column])
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield document_of(row, f"{path} row {number}")
    except ArrowException as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a readable parquet file: {reason}", "Write it again as parquet") from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", "Convert it to UTF-8")
