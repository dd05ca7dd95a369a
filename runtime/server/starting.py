"""Answers on the listening socket while the model loads: `/health` with the progress, the rest with an error."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.core.progress import StartProgress
from runtime.server.drain import WRITE_SECONDS
from runtime.server.errors import RETRY_LATER, ApiError, JsonResponse
from runtime.server.middleware import ConnectionEnd, HeadAsGet, ReadTimeoutProtocol, RequestId, SiteGuard
from runtime.server.response_models import HealthResponse

TICKS_TO_ANSWER = 20
"""Tenths of a second in which clients that are connected when the start is over must have sent their request."""


class StartingApp:
    """Answers 503 to every request.

    Args:
        progress: of the start, which another thread goes on with.
    """

    def __init__(self, progress: StartProgress) -> None:
        self.progress = progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            response = JsonResponse(self.health(), 503, RETRY_LATER)
        else:
            message = f"The server is starting: {self.progress.position}. Try again later."
            response = ApiError(503, message, code="starting", headers=RETRY_LATER).response()
        await response(scope, receive, send)

    def health(self) -> HealthResponse:
        position, seconds = self.progress.position, round(self.progress.elapsed, 1)
        return {
            "status": "starting",
            "reason": f"the server is starting: {position}",
            "running": 0,
            "waiting": 0,
            "progress": {"stage": position.stage, "done": position.done, "total": position.total, "seconds": seconds},
        }


class StartingServer(uvicorn.Server):
    """uvicorn's server, which at its end leaves new connections to who takes over, and answers those that it has."""

    ticks_left = TICKS_TO_ANSWER

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to shut down; called ten times a second."""
        if not await super().on_tick(counter):
            return False
        for server in self.servers:
            server.close()
        self.ticks_left -= 1
        return self.ticks_left <= 0 or not self.server_state.connections


@contextmanager
def answering(
    listener: socket.socket,
    progress: StartProgress,
    client_seconds: float,
    allowed_hosts: Collection[str] = (),
    **encryption: Any,
) -> Iterator[uvicorn.Server]:
    """Answers in a thread until the block ends, or before, within a tenth of a second of `should_exit`. Clients that
    connect later wait for who accepts next.

    Args:
        client_seconds: time for a client to send the head of a request, and to read on.
        allowed_hosts: host names by which clients may address the server; empty allows any.
        encryption: uvicorn's options of TLS.
    """
    app: ASGIApp = SiteGuard(StartingApp(progress), allowed_hosts)
    app = RequestId(HeadAsGet(ConnectionEnd(app, is_draining=lambda: True)))
    config = uvicorn.Config(
        app,
        http=partial(ReadTimeoutProtocol, client_seconds=client_seconds),  # type: ignore[arg-type]  # any factory will do
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=WRITE_SECONDS,
        **encryption,
    )
    server = StartingServer(config)
    # uvicorn closes the socket that it gets; the other one keeps listening.
    thread = Thread(target=server.run, args=([listener.dup()],), name="starting server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()
