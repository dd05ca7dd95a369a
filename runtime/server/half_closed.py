"""Connections whose client stopped sending: it may still read (`nc -N`), or be gone. Only the second frees its request.

Both look alike until something is sent: the system of a client that is gone answers it with a reset. So bytes that
change no answer are sent at once: those that every answer begins with, or a leading zero of the next chunk's length.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import h11
from h11._writers import ChunkedWriter
from uvicorn.protocols.http.h11_impl import H11Protocol

BEGINNING, LEADING_ZERO = b"HTTP/1.1 ", b"0"
LOOK_SECONDS = 0.05
"""Time between two looks for a reset."""


@dataclass(slots=True)
class BegunAnswer:
    """Transport of an answer whose first bytes were sent already."""

    transport: asyncio.Transport
    num_sent: int

    def write(self, data: bytes) -> None:
        self.transport.write(data[self.num_sent :])
        self.num_sent = 0

    def close(self) -> None:
        self.transport.close()

    def is_closing(self) -> bool:
        return self.transport.is_closing()


class HalfClosedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which answers clients that sent a whole request and then only read.

    With TLS a client that stops sending is gone: asyncio closes such connections.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.has_ended = False
        self.looking: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open."""
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        if self.scheme == "https" or not is_whole or self.cycle.response_complete:
            return False
        if not self.has_ended:
            self.has_ended = True
            self.probe()
            self.look()
        return True

    def probe(self) -> None:
        """Sends bytes that a client that is gone answers with a reset."""
        if not self.cycle.response_started:
            self.transport.write(BEGINNING)
            self.cycle.transport = BegunAnswer(self.transport, len(BEGINNING))  # type: ignore[assignment]
        elif self.is_chunked:
            self.transport.write(LEADING_ZERO)

    @property
    def is_chunked(self) -> bool:
        """Whether the body of the answer that has begun is sent in chunks."""
        return isinstance(self.conn._writer, ChunkedWriter)  # h11 has no public name for it

    def look(self) -> None:
        """Aborts the connection if the client reset it, and looks again later."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.looking = self.loop.call_later(LOOK_SECONDS, self.look)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.has_ended and self.cycle.response_complete:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.looking is not None:
            self.looking.cancel()
        super().connection_lost(exc)
