"""Metadata of a GGUF file: typed values by key, read with bounds checked before anything is allocated."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Letters of `struct` by type number."""
BOOL, TEXT, ARRAY = 7, 8, 9
UINT32, INT32, FLOAT32, UINT64, INT64 = 4, 5, 6, 10, 11
KEY_BYTES = 8 + 4 + 1
"""Bytes of the shortest entry: length of the key, type, value."""
MAX_DEPTH = 4
MAX_KEY_BYTES = 2**16


class DamagedError(ValueError):
    """A byte that contradicts the format."""


@dataclass
class Cursor:
    """A position in a file; every read checks that the file is long enough."""

    data: memoryview
    position: int

    @property
    def size(self) -> int:
        return len(self.data)

    def take(self, count: int) -> memoryview:
        if count > self.size - self.position:
            raise DamagedError(f"it is truncated at byte {self.position}: {count} more bytes are needed")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, letter: str) -> Any:
        """Reads a number of a type of `struct`."""
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        """Reads a length and this many bytes of UTF-8."""
        length, begin = self.number("Q"), self.position
        try:
            return bytes(self.take(length)).decode()
        except UnicodeDecodeError as error:
            raise DamagedError(f"the text at byte {begin} is not UTF-8") from error

    def check_count(self, count: int, least: int, what: str) -> None:
        """Raises DamagedError where `count` entries of at least `least` bytes do not fit into the rest of the file."""
        if count * least > self.size - self.position:
            raise DamagedError(f"it announces {count} {what}, which {self.size} bytes cannot hold")


def read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    """Reads `count` pairs of key and value. Raises DamagedError."""
    cursor.check_count(count, KEY_BYTES, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if not key.isprintable() or not key or len(key) > MAX_KEY_BYTES:
            raise DamagedError(f"a metadata key of {len(key)} characters cannot be printed")
        if key in metadata:
            raise DamagedError(f"it has the metadata key {key!r} twice")
        metadata[key] = _read_value(cursor, cursor.number("I"), key, 0)
    return metadata


def _read_value(cursor: Cursor, kind: int, key: str, depth: int) -> Any:
    if kind in NUMBERS:
        return cursor.number(NUMBERS[kind])
    if kind == BOOL:
        return bool(cursor.number("B"))
    if kind == TEXT:
        return cursor.text()
    if kind == ARRAY and depth < MAX_DEPTH:
        return _read_array(cursor, key, depth + 1)
    raise DamagedError(f"{key!r} has values of the unknown type {kind}")


def _read_array(cursor: Cursor, key: str, depth: int) -> list[Any]:
    kind, count = cursor.number("I"), cursor.number("Q")
    if letter := NUMBERS.get(kind):
        width = struct.calcsize(letter)
        cursor.check_count(count, width, f"numbers in {key!r}")
        return list(struct.unpack(f"<{count}{letter}", cursor.take(count * width)))
    cursor.check_count(count, {BOOL: 1, TEXT: 8}.get(kind, 12), f"values in {key!r}")
    return [_read_value(cursor, kind, key, depth) for _ in range(count)]


def metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """Returns the bytes of all pairs. Integers are unsigned where they can be, and signed in arrays."""
    return b"".join(text_bytes(key) + _typed(value) for key, value in metadata.items())


def text_bytes(text: str) -> bytes:
    """Returns a length and the bytes of a text."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    if isinstance(value, str | bool | int | float):
        kind = _kind(value)
        return struct.pack("<I", kind) + _untyped(value, kind)
    if not isinstance(value, Sequence) or not value:
        raise TypeError(f"metadata cannot hold {value!r}")
    kind = INT32 if type(value[0]) is int else _kind(value[0])
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_untyped(each, kind) for each in value)


def _kind(value: str | bool | int | float) -> int:
    if isinstance(value, str):
        return TEXT
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, float):
        return FLOAT32
    if value < 0:
        return INT32 if value >= -(2**31) else INT64
    return UINT32 if value < 2**32 else UINT64


def _untyped(value: Any, kind: int) -> bytes:
    if kind == TEXT:
        return text_bytes(value)
    return struct.pack("<?" if kind == BOOL else f"<{NUMBERS[kind]}", value)
