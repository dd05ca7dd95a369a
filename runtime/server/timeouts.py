"""A uvicorn protocol that disconnects clients which are too slow to send a request's head or to read their answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SEND_BUFFER_BYTES = 2**18
IDLE_SECONDS = 75
"""Between two requests, before a connection is closed: longer than clients keep theirs. A request sent just when
the other side closes gets an error instead of an answer; httpx waits for 5 seconds, as uvicorn does."""


class ReadTimeoutProtocol(H11Protocol):
    """uvicorn's connection, cut when the client takes too long to send the head of a request, or to read what it asked
    for: uvicorn itself limits only the pause between two requests, and a socket that is closed with unread bytes stays
    until its client leaves.

    What a client leaves unread holds little memory: the transport's buffer (64 KiB), and the kernel's, limited here to
    `SEND_BUFFER_BYTES`. It also takes little for the next bytes to go out: clients may be slow, if they go on.

    Args:
        client_seconds: from opening the connection, or from the first byte of a further request, to the head's end; and
            for the client to read while all buffers are full.
        options: uvicorn's own.
    """

    def __init__(self, *, client_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.client_seconds = client_seconds
        self.timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.expect("head")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self.expect("head")
        else:
            self.met("head")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # What was sent along with the last request may be the start of the next: no further bytes announce it.
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.expect("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self.expect("reading")

    def resume_writing(self) -> None:
        self.met("reading")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.met("head")
        self.met("reading")
        super().connection_lost(exc)

    def expect(self, what: str) -> None:
        """Cuts the connection unless it is met in time."""
        if what not in self.timers:
            self.timers[what] = self.loop.call_later(self.client_seconds, self.transport.abort)

    def met(self, what: str) -> None:
        if timer := self.timers.pop(what, None):
            timer.cancel()
