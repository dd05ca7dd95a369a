"""Interface of LoRA adapters for the engine. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from compress.common.errors import ToolkitError


class Adapter(Protocol):
    """An adapter in host memory, which requests refer to."""

    @property
    def name(self) -> str:
        """Name by which requests ask for it."""

    @property
    def digest(self) -> str:
        """Hash of its files; keys and values are shared between requests of the same digest only."""


class AdapterStore(Protocol):
    """The adapters of an engine. Any thread may call it."""

    def load(self, name: str, path: Path) -> None:
        """Reads and checks the adapter of a folder, and serves it by a name from now on.

        Raises:
            ToolkitError: the folder holds none, it does not fit the model, or the name is taken; nothing is kept then.
        """

    def unload(self, name: str) -> None:
        """Forgets a name; requests in flight keep their adapter. Raises RequestError for an unknown one."""

    def find(self, name: str) -> Adapter | None:
        """Returns an adapter that is in host memory; None if it must be opened."""

    def open(self, name: str) -> Adapter:
        """Returns an adapter, read from its files if need be. Raises ToolkitError as `load`, or if it is unknown."""


def parse_modules(modules: Iterable[str]) -> dict[str, Path]:
    """Returns paths of adapters by name, from `name=path` or JSON objects with both. Raises ToolkitError for another
    form, or a name that is given twice."""
    found: dict[str, Path] = {}
    for each in modules:
        name, path = _parse_module(each)
        if not name or not path:
            raise ToolkitError(f"--lora-modules {each!r} is not NAME=PATH", "Write --lora-modules sql=adapters/sql")
        if name in found:
            raise ToolkitError(f"--lora-modules names {name!r} twice", "Give each adapter a name of its own")
        found[name] = Path(path)
    return found


def _parse_module(text: str) -> tuple[str, str]:
    if not text.startswith("{"):
        name, _, path = text.partition("=")
        return name, path
    with suppress(ValueError):
        found = json.loads(text)
        return str(found.get("name", "")), str(found.get("path", ""))
    return "", ""
