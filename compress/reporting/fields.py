"""JSON that nobody vouches for: every value is checked when it is taken, and an error says where it stands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from compress.checkpoint.errors import CheckpointError

# No figure of a run is larger; what is smaller than its inverse counts as 0. Ratios of both stay finite.
_LARGEST = 1e30
_WHOLE = "whole numbers of at least 0"


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a file.

    Attributes:
        path: the file.
        where: the object's place in it: `blocks[2].linears[0]`; empty for the whole.
        values: the object.
    """

    path: Path
    where: str
    values: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> Fields:
        """Reads a file. Raises CheckpointError when it is missing, not text, not JSON, or no object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} does not exist", "Name a checkpoint folder that this toolkit wrote, with its report"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}", "Copy this file again") from error
        return cls(path, "", values) if isinstance(values, dict) else _refuse(path, "", "is not an object")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """A string; a missing one is an error unless there is a default."""
        value = self._take(key, default)
        return value if isinstance(value, str) else self.refuse(key, "is not text")

    def number(self, key: str) -> float:
        """A finite number, of at most 1e30."""
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            self.refuse(key, "is not a finite number")
        return float(value) if abs(value) >= 1 / _LARGEST else 0.0

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def count(self, key: str) -> int:
        """A whole number of at least 0."""
        value = self.number(key)
        return int(value) if value >= 0 and math.floor(value) == value else self.refuse(key, f"is none of {_WHOLE}")

    def child(self, key: str) -> Fields:
        value = self._take(key)
        return Fields(self.path, self._place(key), value) if isinstance(value, dict) else self._no_object(key)

    def children(self, key: str) -> list[Fields]:
        """A list of objects; a missing one is an error."""
        found = self._list(key)
        places = [f"{self._place(key)}[{index}]" for index in range(len(found))]
        return [
            Fields(self.path, place, value) if isinstance(value, dict) else _refuse(self.path, place, "is no object")
            for place, value in zip(places, found, strict=True)
        ]

    def texts(self, key: str) -> list[str]:
        """A list of strings; a missing one is empty."""
        found = self._list(key) if key in self else []
        return found if all(isinstance(each, str) for each in found) else self.refuse(key, "is no list of text")

    def shape(self, key: str) -> tuple[int, ...]:
        """A list of sizes."""
        found = self._list(key)
        if not all(type(size) is int and size >= 0 for size in found):
            self.refuse(key, f"is no list of {_WHOLE}")
        return tuple(found)

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raises CheckpointError that names the place."""
        _refuse(self.path, self._place(key), problem)

    def _take(self, key: str, default: str | None = None) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        return default if default is not None else self.refuse(key, "is missing")

    def _list(self, key: str) -> list[Any]:
        value = self._take(key)
        return value if isinstance(value, list) else self.refuse(key, "is not a list")

    def _no_object(self, key: str) -> NoReturn:
        self.refuse(key, "is not an object")

    def _place(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def _refuse(path: Path, where: str, problem: str) -> NoReturn:
    what = f"{where} {problem}" if where else f"it {problem}"
    raise CheckpointError(f"{path} is not a report that can be read: {what}", "Copy this file again, or repeat the run")
