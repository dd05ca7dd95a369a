"""Messages between an engine that decodes and one that computes its prompts; the first connects to the second."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.core.request import RequestOptions
from runtime.transfer.connector import RowShape

PAGES, STATES = "pages", "states"
"""Kinds of memory."""

Slots = Sequence[tuple[bytes, int]]
"""Hashes, with the slots of the receiver's host memory where their content belongs."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message, after which the receiver hands over its memory.

    Attributes:
        model: says which pages are equal: model, and formats of pages and states.
        connector: name of the connector.
        shapes: the receiver's host memory.
    """

    model: str
    connector: str
    shapes: Mapping[str, RowShape]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to `Hello`; with an error the connection ends."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Asks for pages, and recurrent states, of a prompt.

    Attributes:
        number: number that the receiver gives to each prompt once.
        token_ids: prompt, up to the end of its last full block.
        slots: by kind.
    """

    number: int
    token_ids: Sequence[int]
    options: RequestOptions
    slots: Mapping[str, Slots]


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Ends a prompt early. `Ended` follows all the same: until then its slots may be written."""

    number: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Hashes of a prompt and of one kind are written."""

    number: int
    kind: str
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more of a prompt will be written."""

    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Alive:
    """The sender computes; a prompt takes its time."""


def limit_sends(connection: socket.socket, seconds: int) -> None:
    """Lets a message raise OSError if the other end has read nothing for some seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
