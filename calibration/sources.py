"""Sources of text: bundled files, local files, the Python manual, a named dataset, or the model itself."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.common.errors import DataError, NumericsError
from compress.common.files import in_home, json_lines, open_at_once, utf8_text
from compress.common.registry import Registry

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


Messages = list[dict[str, str]]
Document = str | Messages

FIELDS = ("text", "messages")
"""Fields of a record that hold a document, in order of preference."""


def document_of(record: object, place: str) -> Document:
    """Returns the document in a record of a .jsonl file, a table or a dataset. Raises DataError: neither is there;
    names the fields that are.

    Args:
        record: a mapping with a `text` string or a `messages` list of `{role, content}`.
        place: file and line, or dataset and row, for the error.
    """
    if isinstance(record, Mapping):
        if isinstance(record.get("text"), str):
            return _whole(record["text"], place)
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return _whole(messages, place)
    raise no_document(place, list(record) if isinstance(record, Mapping) else None)


def _whole(document: Document, place: str) -> Document:
    """Returns the document. Raises DataError for half a surrogate pair, which JSON can escape and no text holds."""
    try:
        (document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place} holds half of a surrogate pair at character {error.start}", "Correct it") from error
    return document


def no_document(place: str, fields: list[str] | None) -> DataError:
    """Builds the error for a record or table without a document; `fields` is None for a record that is not one."""
    found = "it is not an object" if fields is None else f"its fields: {', '.join(map(str, fields)) or 'none'}"
    return DataError(
        f"{place} has neither a `text` string nor a `messages` list ({found})",
        'Rename the field to "text", or to "messages" with {"role", "content"} objects for chats',
    )


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


DEFAULT_SPLIT = "train"
_MARKS = ("dataset_dict.json", "state.json")


def read_named_dataset(spec: str) -> Iterator[Document]:
    """Yields the documents of `name[:config[:split]]`, from the network or the library's cache. Raises DataError: it
    cannot be loaded, or its rows hold no documents."""
    name, config, split = [*spec.split(":"), "", ""][:3]
    try:
        from datasets import DownloadConfig, load_dataset

        options = DownloadConfig(max_retries=1)
        with _quiet("huggingface_hub"):
            rows = load_dataset(name, config or None, split=split or DEFAULT_SPLIT, download_config=options)
    # The library and the network raise many unrelated types.
    except Exception as error:
        problem = f"{spec!r} is neither a file here nor a dataset that could be loaded ({_first_line(error)})"
        remedy = "Give a .txt, .jsonl or .parquet file, a dataset saved with save_to_disk, or bundled or pydoc"
        raise DataError(problem, remedy) from error
    return _documents(rows, spec)


def read_saved_dataset(path: Path) -> Iterator[Document]:
    """Yields the documents of a saved dataset, of its `train` split when it has several. Raises DataError."""
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(path)
    except Exception as error:  # Any of many types, as above.
        raise DataError(
            f"{path} is not a dataset that can be loaded ({_first_line(error)})", "Save it again"
        ) from error
    if isinstance(rows, DatasetDict):
        if DEFAULT_SPLIT not in rows:
            choices = " or ".join(str(path / split) for split in rows)
            raise DataError(f"{path} has no split {DEFAULT_SPLIT!r}", f"Name one: {choices}")
        rows = rows[DEFAULT_SPLIT]
    return _documents(rows, str(path))


def _documents(rows: Dataset | IterableDataset, name: str) -> Iterator[Document]:
    column = next((field for field in FIELDS if field in rows.column_names), None)
    if column is None:
        raise no_document(name, rows.column_names)
    return (document_of(row, f"{name} row {number}") for number, row in enumerate(rows.select_columns(column), 1))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Silences a library's warnings, one for each of its retries: the error is one line."""
    library = logging.getLogger(logger)
    before = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(before)


JSON_ENDINGS = (".jsonl", ".jsonl.xz")
TABLE_ENDING = ".parquet"
TEXT_ENDINGS = (".txt", ".md", *JSON_ENDINGS, TABLE_ENDING)
_ENDINGS = f"{', '.join(TEXT_ENDINGS[:-1])} or {TABLE_ENDING}"


def read_path(path: Path) -> Iterator[Document]:
    """Yields the documents of a file, of every readable file of a folder in order of name, or of a saved dataset.
    Raises DataError: nothing to read, or a record without a document; names file and line."""
    try:
        yield from _read(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", "Check the file") from error


def _read(path: Path) -> Iterator[Document]:
    if path.is_dir():
        is_saved = any((path / mark).is_file() for mark in _MARKS)
        yield from read_saved_dataset(path) if is_saved else _read_folder(path)
    elif path.name.endswith(JSON_ENDINGS):
        yield from (document_of(record, place) for place, record in json_lines(path))
    elif path.name.endswith(TABLE_ENDING):
        yield from _read_table(path)
    else:
        with utf8_text(path), open(path, encoding="utf-8-sig", opener=open_at_once) as stream:
            yield stream.read()


def _read_folder(path: Path) -> Iterator[Document]:
    names = sorted(child for child in path.rglob("*") if child.name.endswith(TEXT_ENDINGS))
    if not names:
        raise DataError(f"folder {path} holds no {_ENDINGS} file", "Name the file itself")
    for child in names:
        yield from _read(child)


def _read_table(path: Path) -> Iterator[Document]:
    """Yields the rows of a parquet file, a batch at a time."""
    from datasets import load_dataset
    from pyarrow import ArrowException

    pattern = glob.escape(str(path.absolute()))
    try:
        with _quiet("datasets"):
            rows = load_dataset("parquet", data_files=pattern, split=DEFAULT_SPLIT, streaming=True)
            yield from _documents(rows, str(path))
    except ArrowException as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a readable parquet file: {reason}", "Write it again as parquet") from error


DOCUMENT_SEPARATOR = "<|document|>"
NAMED_SOURCES: Registry[Callable[[], tuple[Iterator[Document], str]]] = Registry("text")
"""Functions that return the documents of a text and its description, by its name."""
SELF = "self"
"""The source for text that the model itself writes, in a mixture after pieces of the other texts: token sequences, not
documents."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """Documents of one origin.

    Attributes:
        name: as the user wrote it: `bundled`, `pydoc`, a path or a dataset name.
        documents: texts, or chats (lists of `{role, content}`) that need a model's template to become text.
        description: origin, with versions where they matter.
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
    """Reads the documents that `spec` names. Raises DataError: nothing to read, or only white space. `spec`: `bundled`
    (mixed text that ships with the package), `pydoc` (the Python manual inside every CPython), a text file, a `.jsonl`,
    `.jsonl.xz` or `.parquet` file with `text` or `messages` fields, a folder of such files or one that `datasets`
    saved, or a `datasets` name as `name[:config[:split]]`."""
    documents, description = _open(spec)
    source = TextSource(spec, tuple(documents), description)
    if not any(document if isinstance(document, list) else document.strip() for document in source.documents):
        raise DataError(f"{spec} holds no text", "Give a file with text, or leave the option out for the bundled text")
    return source


def _open(spec: str) -> tuple[Iterator[Document], str]:
    path = in_home(spec)
    if spec in NAMED_SOURCES:
        return NAMED_SOURCES[spec]()
    if spec == SELF:
        raise DataError("text from the model itself can calibrate but not measure", "Use " + " or ".join(NAMED_SOURCES))
    if spec.partition(":")[0] in (*NAMED_SOURCES, SELF) and not path.exists():
        raise DataError(f"{spec} is a single text, which takes no weight", f"Write {spec.partition(':')[0]}")
    if not spec:
        raise DataError("no text was named", "Give a file, or one of: " + ", ".join(NAMED_SOURCES))
    if path.is_char_device() or path.is_block_device():
        raise DataError(f"{path} is a device, not a text", "Name a file, a folder or a pipe")
    if path.exists():
        return read_path(path), f"local text {spec}"
    if spec.endswith((*TEXT_ENDINGS, ".xz")) or spec.startswith((".", "/", "~")):
        raise DataError.missing("text file", spec, "Give an existing file, or one of: " + ", ".join(NAMED_SOURCES))
    return read_named_dataset(spec), f"dataset {spec}"


@NAMED_SOURCES.register("bundled")
def _bundled() -> tuple[Iterator[Document], str]:
    paths = sorted(Path(str(files("calibration") / "data")).glob("*.txt"))
    parts = (part for path in paths for part in path.read_text(encoding="utf-8").split(f"{DOCUMENT_SEPARATOR}\n"))
    return (part.strip() for part in parts if part.strip()), "mixed text that ships with the package"


@NAMED_SOURCES.register("pydoc")
def _pydoc() -> tuple[Iterator[Document], str]:
    from pydoc_data.topics import topics

    return (topics[key] for key in sorted(topics)), f"pydoc_data.topics of Python {platform.python_version()}"


@torch.inference_mode()
def sample_sequences(
    model: Any,
    prompts: Tensor,
    length: int,
    *,
    start: int | None,
    ends: Collection[int] = (),
    seed: int = 0,
    batch: int = 32,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Samples a sequence of exactly `length` tokens at temperature 1 after each prompt, as Liu et al. 2023,
    https://arxiv.org/abs/2305.17888, section 3.1, do after a single token.

    Every sequence begins with `start` and its prompt. Where the model ends a text, `start` stands instead of the end
    token, as between the documents of packed text, and a new text begins. Raises NumericsError: the model gave NaN or
    infinite logits.

    Args:
        prompts: int64 `[N, P]` on the CPU, shorter than `length`; P is 0 for text from the first token on.
        start: the token before each text; without one and without prompts, the first token of each sequence is drawn
            from the whole vocabulary.
        batch: sequences at a time; the result depends on it as on the seed.
        on_progress: called with (tokens done, tokens in all).

    Returns:
        int64 `[N, length]` on the CPU.
    """
    pieces, count = [], len(prompts)
    for first in range(0, count, batch):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + first)
        known = _begin(model, prompts[first : first + batch], start, generator)
        cache: dict[str, Any] = {}
        columns = [known[:, :1]]
        # Prompts go in a token at a time: the logits of all their positions would take far more memory.
        for step in range(1, length):
            output = model(columns[-1].to(model.device), use_cache=True, **cache)
            name = "cache" if hasattr(output, "cache") else "past_key_values"  # the name before transformers 5.24
            cache = {name: getattr(output, name)}
            is_known = step < known.shape[1]
            columns.append(known[:, step : step + 1] if is_known else _draw(output.logits[:, -1], generator))
            if start is not None:
                columns[-1][torch.isin(columns[-1], torch.tensor(list(ends), dtype=torch.int64))] = start
            on_progress(first * length + len(known) * (step + 1), count * length)
        pieces.append(torch.cat(columns, dim=1))
    return torch.cat(pieces)


def _begin(model: Any, prompts: Tensor, start: int | None, generator: torch.Generator) -> Tensor:
    if start is not None:
        return torch.cat([torch.full((len(prompts), 1), start), prompts], dim=1)
    return (
        prompts if prompts.numel() else torch.randint(model.config.vocab_size, (len(prompts), 1), generator=generator)
    )


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Samples one token per row, `[B, 1]`, on the CPU: its generator gives the same draws on every machine."""
    if not torch.isfinite(logits).all():
        raise NumericsError("the source model gave NaN or infinite logits", "Calibrate on a text instead of self")
    return torch.multinomial(logits.float().cpu().softmax(-1), 1, generator=generator)
