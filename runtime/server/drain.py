"""Stopping without a lost answer: requests in flight end, new ones are refused, and what is late gets an error."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.errors import ApiError, aborted, draining
from runtime.server.middleware import IDLE_SECONDS, ReadTimeoutProtocol

logger = logging.getLogger("runtime.server")

WRITE_SECONDS = 5
SERVED_WHILE_DRAINING = frozenset({"/health", "/metrics"})


class Drain:
    """The requests in flight, and whether the server still takes new ones. Used on the event loop's thread.

    Args:
        stop_engine: ends the engine, and with it all of its requests; may block.
        has_failed: returns whether the engine has ended by itself, after which the server ends, too.
        write_seconds: time to write the errors of requests that are ended, before they are given up.
    """

    def __init__(
        self,
        stop_engine: Callable[[], object],
        has_failed: Callable[[], bool] = lambda: False,
        write_seconds: float = WRITE_SECONDS,
    ) -> None:
        self.stop_engine, self.has_failed = stop_engine, has_failed
        self.write_seconds = write_seconds
        self.has_begun = False
        self.in_flight: dict[asyncio.Task[Any], bool] = {}
        """Whether the answer has begun, by the task of a request."""

    async def end(self) -> None:
        """Ends all requests in flight, and waits until their errors are written.

        Those without an answer yet are cancelled and get an error instead. The engine ends the streams, each with an
        error event; a stream that its client does not read is cancelled in the end.
        """
        stopping = asyncio.create_task(asyncio.to_thread(self.stop_engine))
        for task, has_begun in self.in_flight.items():
            if not has_begun:
                task.cancel()
        await self._wait()
        for task in self.in_flight:
            task.cancel()
        await self._wait()
        await stopping

    async def _wait(self) -> None:
        if self.in_flight:
            await asyncio.wait(self.in_flight, timeout=self.write_seconds)


class DrainGuard:
    """Answers 503 to new requests while the server drains, and to requests that the end of the drain cancels."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_check = scope["path"] in SERVED_WHILE_DRAINING
        error = draining() if self.drain.has_begun and not is_check else await self.run(is_check, scope, receive, send)
        if error is not None:
            await error.response()(scope, receive, send)

    async def run(self, is_check: bool, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        """Answers a request, for which the drain waits unless it is a check. Returns the error to send instead if the
        end of the drain cancels it before its answer has begun."""
        task, in_flight = cast("asyncio.Task[None]", asyncio.current_task()), self.drain.in_flight

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start" and task in in_flight:
                in_flight[task] = True
            await send(message)

        if not is_check:
            in_flight[task] = False
            task.add_done_callback(lambda task: in_flight.pop(task, None))
        try:
            await self.app(scope, receive, send_noting)
        except asyncio.CancelledError:
            if not self.drain.has_begun:
                raise
            task.uncancel()
            return None if in_flight.get(task, True) else aborted()
        return None


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a drain before its shutdown, which closes the listening sockets first.

    The first signal, or the end of a failed engine, begins the drain; a second one ends it.

    Args:
        drain: that of the application.
        seconds: time for requests in flight to end.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, seconds: float) -> None:
        super().__init__(config)
        self.drain = drain
        self.seconds = seconds
        self.deadline = float("inf")
        self.is_announced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal. May interrupt anything, so it only sets flags."""
        seconds = 0.0 if self.should_exit else self.seconds
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        self.drain.has_begun = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to shut down; called ten times a second."""
        if not self.should_exit and self.drain.has_failed():
            self.handle_exit(signal.SIGTERM, None)
            self.deadline = min(self.deadline, time.monotonic() + self.drain.write_seconds)  # of other engines, too
        if not await super().on_tick(counter):
            return False
        if not self.is_announced:
            self.is_announced = True
            logger.info("stopping: up to %g s for %d requests", self.seconds, len(self.drain.in_flight))
        if self.drain.in_flight and time.monotonic() >= self.deadline:
            await self.drain.end()
            return True
        return not self.drain.in_flight


def create_server(app: FastAPI, drain_seconds: float, client_seconds: float, **options: Any) -> DrainingServer:
    """Creates the server of an application of `create_app`.

    Args:
        drain_seconds: time for requests in flight to end after a signal.
        client_seconds: time for a client to send the head of a request, and to read on.
        options: further options of uvicorn.
    """
    config = uvicorn.Config(
        app,
        http=partial(ReadTimeoutProtocol, client_seconds=client_seconds),  # type: ignore[arg-type]  # any factory will do
        ws="none",
        log_config=None,  # its loggers use those of the process
        access_log=False,
        timeout_graceful_shutdown=WRITE_SECONDS,
        timeout_keep_alive=IDLE_SECONDS,
        **options,
    )
    return DrainingServer(config, app.state.drain, drain_seconds)
