"""Options of a configuration, declared on the fields of its dataclass: default, help text and bounds in one place.

Plain data: `compress.common.cli` makes options of the command line of it, and scripts that use the configuration import
no command line.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, field
from typing import Any

METADATA_KEY = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line side of a field.

    Attributes:
        flags: as they are typed, such as `--kv-memory`.
        help: one or two sentences.
        choices: the only values; empty for any.
        minimum, maximum: bounds of a number, both included.
        metavar: name of the value in help.
        is_size: the value is a number of bytes, typed as `4GiB`.
    """

    flags: tuple[str, ...]
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    metavar: str | None = None
    is_size: bool = False


def option(*flags: str, default: Any, help: str, **details: Any) -> Any:
    """Declares a dataclass field that is also an option of the command line; `details` are other fields of `Option`."""
    return field(default=default, metadata={METADATA_KEY: Option(flags, help, **details)})


def option_of(each: Field[Any]) -> Option | None:
    """The option that a field declares, if it does."""
    return each.metadata.get(METADATA_KEY)


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KiB|MiB|GiB)?", re.IGNORECASE)
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB` or `1000000`. Raises ValueError for anything else."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 4GiB")
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])


def format_size(num_bytes: int) -> str:
    """The shortest exact way to write a size, such as `4MiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % UNITS[unit.lower()] == 0:
            return f"{num_bytes // UNITS[unit.lower()]}{unit}"
    return str(num_bytes)
