"""Writing that either happens whole or not at all, lines of JSON, and YAML as text: full disks and damaged text become
refusals."""

from __future__ import annotations

import errno
import json
import lzma
import os
import shlex
import shutil
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

from compress.common.errors import CheckpointError, DataError, ToolkitError

if TYPE_CHECKING:
    import yaml

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTIAL_SUFFIX = ".partial"

REPORT_FILE = "compression_report.json"
RECEIPT_FILE = "receipt.json"


def in_home(path: str | Path) -> Path:
    """The path with `~` and `~user` replaced; a user that does not exist stays part of the name."""
    return Path(os.path.expanduser(path))  # pathlib raises an error for such a user


def cache_folder(name: str) -> Path:
    """Returns the folder `name` of this toolkit in the user's cache, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress-runtime" / name


def check_out_folder(out: str | Path) -> Path:
    """The output folder, which must not exist yet: nothing is ever overwritten. Raises CheckpointError: it exists, or
    its parent cannot hold it."""
    path = in_home(out)
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"output {path} exists already", _make_room(path))
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise CheckpointError(f"cannot create {path}: {parent} is not a writable folder", "Choose another --out")
    return path


def _make_room(path: Path) -> str:
    """Suggests removal only of folders that a run has written: `--out .` may be a folder with other work."""
    if path.name in ("", "..") or not (path / REPORT_FILE).is_file():
        return "Choose another --out"
    return f"Remove it (rm -r {shlex.quote(str(path))}) or choose --out OTHER"


def partial_folder(out: Path) -> Path:
    """Where everything unfinished about `out` lives, next to it and so on the same disk."""
    return out.with_name(out.name + PARTIAL_SUFFIX)


def check_space(folder: Path, needed: int) -> None:
    """Raises CheckpointError when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {_megabytes(free)} free, but {_megabytes(needed)} are needed",
            "Free space or choose another --out",
        )


@contextmanager
def refuse_when_full(target: Path) -> Iterator[None]:
    """Turns a full disk, an exceeded quota or file-size limit into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise CheckpointError(
            f"no space left while writing {target} ({error.strerror})",
            "Free space or choose another --out, then run the same command again",
        ) from error


def check_file(path: Path) -> None:
    """Raises CheckpointError for a folder, device or pipe in the place of a file to read or write."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file", "Name another file")


def check_target(path: Path) -> None:
    """Raises CheckpointError if a file cannot be written for its folder, or is one itself."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder", "Name a file in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CheckpointError.missing("folder", path.parent, f"Create it, or name another file than {path.name}")
    if not os.access(folder, os.W_OK):
        raise CheckpointError(f"{folder} cannot be written to", "Change its permissions, or name another file")


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes appear as `target` only when everything was written and is on disk."""
    check_file(target)
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        with refuse_when_full(target):
            with unfinished.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, target)
            sync(target.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes what a file has, or the renames inside of a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


def size(count: float) -> str:
    """`6.65 MB`: decimal units, three digits."""
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.{2 if count < 100 * unit else 0}f} {name}"
    return f"{count:.0f} bytes"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


MAX_FILE_BYTES = 100_000_000
"""Far above the largest tokenizer or index of weights."""
LFS_MARK = b"version https://git-lfs"


def is_lfs_pointer(path: Path) -> bool:
    """Returns whether a file is what git stores in place of a large one."""
    with path.open("rb") as stream:
        return stream.read(len(LFS_MARK)) == LFS_MARK


def check_content(path: Path) -> None:
    """Raises CheckpointError for a pointer of git-lfs in the place of a file."""
    if is_lfs_pointer(path):
        remedy = f"Run git lfs pull in {path.absolute().parent}"
        raise CheckpointError(f"{path} is a pointer of git-lfs, not the file itself", remedy)


def read_file(path: Path) -> bytes:
    """Reads a file that is small by its purpose: a config, tokenizer, template, schema or recipe. Raises
    CheckpointError: it is a folder, device or pipe, larger than `MAX_FILE_BYTES`, or a pointer of git-lfs; OSError: it
    does not exist, or cannot be read."""
    check_file(path)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        problem = f"{path} has {_megabytes(size)}, and such a file has at most {_megabytes(MAX_FILE_BYTES)}"
        raise CheckpointError(problem, "Name another file")
    check_content(path)
    return path.read_bytes()


def read_text(path: Path, kind: type[ToolkitError] = CheckpointError) -> str:
    """Reads a small file as text, without its byte order mark. `kind`: of the error for a file that `read_file`
    refuses, or that is not UTF-8."""
    try:
        with utf8_text(path):
            return read_file(path).decode("utf-8-sig")
    except (CheckpointError, DataError) as error:
        raise kind(error.problem, error.remedy) from error


def read_json(path: Path, remedy: str = "Download this file again") -> Any:
    """Read a JSON file. Raises CheckpointError when it is none, or nested deeper than any such file, and as
    `read_file`."""
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", remedy) from error


@contextmanager
def without_marks(folder: Path) -> Iterator[Path]:
    """Yields a folder whose JSON files begin with no byte order mark, which other libraries do not read: `folder`, or a
    temporary one with links to its files and corrected copies. Raises CheckpointError: a device or pipe in the place of
    one of its files, which other libraries would wait for."""
    files = [*folder.glob("*.json"), *folder.glob("*.jinja")]
    for file in files:
        check_file(file)
    marked = [file for file in files if file.is_file() and _is_marked(file)]
    if not marked:
        yield folder
        return
    with TemporaryDirectory() as name:
        for file in folder.iterdir():
            if file not in marked:
                Path(name, file.name).symlink_to(file.absolute())
        for file in marked:
            Path(name, file.name).write_text(read_text(file), encoding="utf-8")
        yield Path(name)


def _is_marked(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(BOM_UTF8)) == BOM_UTF8


def open_at_once(path: str, flags: int) -> int:
    """Opens a file or pipe for `open`; a pipe that no process writes to is empty, where it would block until one
    does."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(handle, True)
    return handle


@contextmanager
def utf8_text(path: Path | str) -> Iterator[None]:
    """Turns bytes that are not UTF-8 into a DataError that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not {error.encoding.upper()} text: {error.reason} at byte {error.start}", "Convert it to UTF-8"
        ) from error


def _parse_line(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}", "Write one JSON object per line") from error


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the value of every line that is not blank, with its place `file:line`. Reads lazily, `.xz` files too.
    Raises DataError: the file is not UTF-8 or no whole xz file, or a line is not JSON."""
    with (
        utf8_text(path),
        lzma.open(path, "rt", encoding="utf-8-sig")
        if path.suffix == ".xz"
        else open(path, encoding="utf-8-sig", opener=open_at_once) as lines,
    ):
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _parse_line(line, f"{path}:{number}")
        except (lzma.LZMAError, EOFError) as error:
            raise DataError(f"{path} is not a whole xz file: {error}", "Compress it again with xz") from error


@dataclass(frozen=True, slots=True)
class YamlPart:
    """A text, list or mapping of a YAML file. `place`: `file:line`."""

    place: str
    value: str | list[YamlPart] | dict[str, YamlPart]

    def text(self, name: str) -> str:
        """Returns a text, which `name` describes. Raises DataError for a list or mapping."""
        if isinstance(self.value, str):
            return self.value
        raise DataError(f"{self.place}: {name} is a {type(self.value).__name__}", f"Write '{name}: VALUE'")


def read_yaml(path: Path) -> YamlPart:
    """Reads a YAML file. All scalars stay text: `0123` and `16e3` are not numbers. An empty file is an empty mapping.

    Errors quote no values, which may be secrets. Raises DataError: the file cannot be read, is not UTF-8 text or not
    YAML, or gives a key twice.
    """
    import yaml

    try:
        root = yaml.compose(read_text(path, DataError), Loader=yaml.BaseLoader)
        return _yaml_part(path, root) if root is not None else YamlPart(str(path), {})
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Name a YAML file") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply", "Correct the file") from error
    except yaml.YAMLError as error:
        mark, reason = getattr(error, "problem_mark", None), getattr(error, "problem", "invalid characters")
        place = f"{path}:{mark.line + 1}" if mark else path
        raise DataError(f"{place} is not YAML: {reason}", "Correct the file") from None


def _yaml_part(path: Path, node: yaml.Node) -> YamlPart:
    place = f"{path}:{node.start_mark.line + 1}"
    if node.id == "sequence":  # type: ignore[attr-defined]  # every kind of node has it
        return YamlPart(place, [_yaml_part(path, item) for item in node.value])
    if node.id == "scalar":  # type: ignore[attr-defined]
        return YamlPart(place, str(node.value))
    found: dict[str, YamlPart] = {}
    for key, value in node.value:
        if (name := str(key.value)) in found:
            raise DataError(f"{path}:{key.start_mark.line + 1}: {name!r} is given twice", "Keep one of them")
        found[name] = _yaml_part(path, value)
    return YamlPart(place, found)
