"""Unfinished work in a folder of its own: what its result depends on, and one process at a time."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.common.errors import CheckpointError
from compress.common.files import atomic_file, read_json

_LOCK, _RECORD = "lock", "progress.json"


@contextmanager
def held_by_one(folder: Path, busy: CheckpointError) -> Iterator[None]:
    """Holds a folder for this process, and removes it at the end when nothing is left in it. Raises CheckpointError:
    `busy`, when another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise busy from error
        try:
            yield
        finally:
            Path(lock.name).unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()


def has_progress(folder: Path) -> bool:
    """Returns whether an earlier run left something to continue from."""
    return (folder / _RECORD).is_file()


def begin(folder: Path, identity: Mapping[str, Any]) -> None:
    """Records what the result depends on: from here on there is progress."""
    with atomic_file(folder / _RECORD) as stream:
        stream.write(json.dumps(identity, indent=2).encode())


def differences(folder: Path, identity: Mapping[str, Any]) -> list[str]:
    """Returns what differs between the identity of the progress in a folder, if there is any, and this one."""
    if not has_progress(folder):
        return []
    return changes(read_json(folder / _RECORD, "Add --restart"), identity)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that differs between nested plain values."""
    old, new = _flat(before), _flat(now)
    return [f"{key} was {old.get(key)}, now {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def check_same(folder: Path, identity: Mapping[str, Any], remedy: str) -> None:
    """Raises CheckpointError where the progress in a folder is of another identity; says what differs."""
    if differing := differences(folder, identity):
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        shown = "; ".join(differing[:4])
        raise CheckpointError(f"{folder} holds unfinished progress of another configuration: {shown}{more}", remedy)


def discard(folder: Path) -> None:
    """Removes everything but the lock."""
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        elif child.name != _LOCK:
            child.unlink()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings and sequences as one level, keys joined by dots."""
    is_sequence = isinstance(value, list | tuple)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if is_sequence else None
    if items is None:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flat(item, f"{prefix}.{key}".lstrip("."))
    return flat or {prefix: list(value)}
