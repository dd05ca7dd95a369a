"""Keys of config.json that are read, and those that change no numbers; every other one is refused."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from compress.common.errors import CheckpointError


def refuse_unread(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises CheckpointError for keys that are not known, unless they are null, false or empty."""
    unread = {key: value for key, value in given.items() if key not in known and not _is_off(value)}
    for key, value in sorted(unread.items()):
        raise CheckpointError(
            f"{where} has {key}={reprlib.repr(value)}, which nothing here reads and which may change numbers",
            f"Remove {key} from config.json if it changes none, or use an engine that reads it",
        )


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})
