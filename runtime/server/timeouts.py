"""A uvicorn protocol that disconnects clients which are too slow to send a request's head or to read their answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SEND_BUFFER_BYTES = 2**18
IDLE_SECONDS = 75
"""Idle time between two requests of a connection before it is closed. It exceeds that of clients (httpx: 5 s), because
a request that is sent while the server closes the connection fails."""


class ReadTimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits for the client.

    Aborts the connection if the client takes too long to send the head of a request or to read the answer. uvicorn
    limits only the pause between two requests, and a socket closed with unread bytes stays open until its client closes
    it.

    Unread data takes little memory: the transport's buffer (64 KiB) and the kernel's, limited here to
    `SEND_BUFFER_BYTES`. A client may be slow as long as it continues to read.

    Args:
        client_seconds: time from the start of the connection, or from the first byte of a further request, to the end
            of the head; and time for the client to read while all buffers are full.
        options: options of uvicorn's protocol.
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
        # Data that followed the last request may be the start of the next one; no further bytes may announce it.
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
        """Aborts the connection unless `met` is called in time."""
        if what not in self.timers:
            self.timers[what] = self.loop.call_later(self.client_seconds, self.transport.abort)

    def met(self, what: str) -> None:
        """Cancels the timer of `expect`."""
        if timer := self.timers.pop(what, None):
            timer.cancel()
