"""The folder of a model that is named in any way. That of a GGUF file is in the user's cache: config.json and tokenizer
from its metadata, and a link to the file, whose weights stay where they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from compress.checkpoint.config import CONFIG_FILE
from compress.checkpoint.locate import find_model
from compress.checkpoint.locate.file_names import part_paths
from compress.common.errors import CheckpointError
from compress.common.files import cache_folder, in_home, refuse_when_full
from compress.common.model_folder import GGUF_SUFFIX

VERSION = 2
"""Changes with the files that are made from the same metadata."""
LINK = f"model{GGUF_SUFFIX}"


def is_gguf(path: str | Path) -> bool:
    """Whether a model is named by a GGUF file."""
    return Path(path).suffix.lower() == GGUF_SUFFIX and in_home(path).is_file()


def folder_of(model: str | Path, *, weights: bool = True, values: bool = True, code: bool = False) -> Path:
    """Returns the folder of a model that is named in any way; that of a GGUF file is made once.

    Args:
        weights: as for `find_model`, like `values` and `code`.

    Raises:
        CheckpointError: as `find_model`; a GGUF file that cannot be read, of another architecture or kind of
            tokenizer, or no space.
    """
    found = find_model(model, weights=weights, values=values, code=code)
    if not is_gguf(found):
        return found
    file = found.absolute()  # its own name: the hub's cache links to files with other names
    folder = cache_folder("gguf") / _key(file) / file.stem
    if not (folder / CONFIG_FILE).is_file():
        _make(file, folder)
    return folder


def _key(file: Path) -> str:
    states = [part.stat() for part in part_paths(file)]
    parts = " ".join(f"{state.st_size} {state.st_mtime_ns}" for state in states)
    return hashlib.sha256(f"{VERSION} {file} {parts}".encode()).hexdigest()[:16]


def _make(file: Path, folder: Path) -> None:
    from compress.checkpoint.gguf.parts import open_parts
    from compress.checkpoint.gguf.tensors import model_config, open_gguf
    from compress.checkpoint.gguf.tokenizer import tokenizer_files

    opened = open_parts(file)
    config = model_config(opened)
    open_gguf(file)
    try:
        files = tokenizer_files(opened.metadata, config["vocab_size"])
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error.problem}", error.remedy) from error
    generation = json.loads(files["generation_config.json"])
    files[CONFIG_FILE] = json.dumps({**config, **generation}, indent=2)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        with refuse_when_full(folder):
            _write(unfinished, files, file)
            if not folder.is_dir():
                unfinished.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error.strerror}", "Set XDG_CACHE_HOME to another folder"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, files: dict[str, str], file: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / LINK).unlink(missing_ok=True)
    (folder / LINK).symlink_to(file)
