"""Connections that do not wait for ever for a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class HurriedConnection(H11Protocol):
    """uvicorn's connection, closed when the head of a request is not complete in time: uvicorn itself limits only the
    pause between two requests.

    Args:
        head_seconds: from opening the connection, or from the first byte of a further request, to the head's end.
        options: uvicorn's own.
    """

    def __init__(self, *, head_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.head_seconds = head_seconds
        self.head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self.wait_for_head()
        else:
            self.stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def wait_for_head(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
