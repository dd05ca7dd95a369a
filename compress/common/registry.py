"""Registries: named entries that the modules of a folder add, so that a new entry is a new file and no other change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar, cast

from compress.common.errors import ToolkitError

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry]):
    """Entries by name. The first read imports the modules of a folder, which register the entries.

    Iteration is by order, then by name, whichever module was imported first.

    Args:
        kind: what an entry is, for errors.
        folder: the package whose modules register entries; "" where those are in the module of the registry.
        error: class of the error for an unknown name.
    """

    def __init__(self, kind: str, folder: str = "", error: type[ToolkitError] = ToolkitError) -> None:
        self.kind = kind
        self._error = error
        self._folder = folder
        self._entries: dict[str, tuple[int, Entry]] = {}
        self._aliases: dict[str, str] = {}

    def register(self, *names: str, order: int = 0, aliases: Iterable[str] = ()) -> Callable[[Entry], Entry]:
        """Returns a decorator that adds an entry and returns it. Raises ValueError: a name is registered already.

        Args:
            names: its names; its attribute `name` where none is given.
            order: its position, lowest first.
            aliases: other names of the first name, which are found but not listed.
        """

        def add(entry: Entry) -> Entry:
            own = names or (entry.name,)  # type: ignore[attr-defined]
            if taken := [name for name in (*own, *aliases) if name in self._entries or name in self._aliases]:
                raise ValueError(f"{self.kind} {', '.join(taken)} is registered already")
            self._entries.update(dict.fromkeys(own, (order, entry)))
            self._aliases.update(dict.fromkeys(aliases, own[0]))
            return entry

        return add

    def remove(self, name: str) -> None:
        """Removes an entry, if it is there."""
        self._aliases = {alias: named for alias, named in self._aliases.items() if named != name}
        self._entries.pop(name, None)

    def find(self, name: object, remedy: str = "") -> Entry:
        """Returns an entry. Raises `error` for an unknown name, with the nearest known one and what else helps."""
        if name not in self:
            raise self._error.unknown(self.kind, name, self, remedy=remedy)
        return self[cast(str, name)]

    def __getitem__(self, name: str) -> Entry:
        if not isinstance(name, str):  # a value of a config.json may be anything
            raise KeyError(name)
        return self.load()[self._aliases.get(name, name)][1]

    def __iter__(self) -> Iterator[str]:
        entries = self.load()
        return iter(sorted(entries, key=lambda name: (entries[name][0], name)))

    def __len__(self) -> int:
        return len(self.load())

    def load(self) -> dict[str, tuple[int, Entry]]:
        """Imports the folder once, and returns the order and entry of each name."""
        if self._folder:
            for module in iter_modules(import_module(self._folder).__path__):
                import_module(f"{self._folder}.{module.name}")
            self._folder = ""
        return self._entries
