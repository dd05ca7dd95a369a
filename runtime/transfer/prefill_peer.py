"""Connection of an engine that generates to one that computes prompts; opened again when it is lost."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from runtime.engine.wire import receive, send
from runtime.transfer.connector import Offered
from runtime.transfer.messages import Hello, Welcome, limit_sends

logger = logging.getLogger("runtime.transfer.prefill_peer")

RETRY_SECONDS = 0.2
POLL_SECONDS = 0.5

SEND_SECONDS = 2
"""Maximum wait for an engine that reads nothing; its connection ends after that."""

STALL_SECONDS = 20.0
"""Time without a sign of the other engine after which its prompts are computed here."""


class Link:
    """A connection that is open, or was.

    Attributes:
        num_open: prompts that the other engine computes; written by the engine's thread.
        is_open: whether messages can be sent.
        is_stalled: whether the other engine has made no progress for a while.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.num_open = 0
        self.is_open, self.is_stalled = True, False
        self.last_sign = time.monotonic()
        self._lock = threading.Lock()

    @property
    def is_usable(self) -> bool:
        """Whether it may get prompts."""
        return self.is_open and not self.is_stalled

    def send(self, message: Any) -> bool:
        """Sends a message. Returns False if the connection is lost, or the other engine reads nothing."""
        if not self.num_open:
            self.last_sign = time.monotonic()
        try:
            with self._lock:
                send(self.connection, message)
        except OSError:
            self.is_open = False
            with suppress(OSError):  # only this half: the other engine ends its own once it writes to no slot
                self.connection.shutdown(socket.SHUT_WR)
        return self.is_open


class Listener(Protocol):
    """Is told what happens on a connection, in the thread that reads it."""

    def handle(self, message: Any) -> None:
        """A message has arrived."""

    def give_up(self, link: Link) -> None:
        """The other engine has made no progress for a while; it may go on later."""

    def lose(self, link: Link) -> None:
        """The connection has ended, and the other engine no longer writes."""


class PrefillPeer:
    """An engine that computes prompts.

    Args:
        path: Unix socket on which it listens.
        hello: first message.
        offered: memory that it writes.

    Attributes:
        link: the connection, while there is one.
    """

    def __init__(
        self, path: Path, hello: Hello, offered: Offered, listener: Listener, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self.path, self.hello, self.offered, self.listener = path, hello, offered, listener
        self.stall_seconds = stall_seconds
        self.link: Link | None = None
        self._problem = ""
        threading.Thread(target=self._run, name="prefill peer", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    limit_sends(connection, SEND_SECONDS)
                    connection.connect(str(self.path))
                    send(connection, self.hello)
                    welcome: Welcome = receive(connection)
                    if welcome.error:
                        raise ConnectionError(welcome.error)
                    self.offered.send(connection)
                    self._serve(Link(connection))
            except (EOFError, OSError) as error:
                self._note(f"{type(error).__name__}: {error}")
            time.sleep(RETRY_SECONDS)

    def _note(self, problem: str) -> None:
        """Logs why there is no connection, once."""
        if problem != self._problem:
            logger.warning("%s computes no prompts for this engine: %s", self.path, problem)
        self._problem = problem

    def _serve(self, link: Link) -> None:
        """Reads messages until the connection is lost."""
        self.link, self._problem = link, ""
        try:
            while True:
                if select.select([link.connection], [], [], min(POLL_SECONDS, self.stall_seconds))[0]:
                    message = receive(link.connection)
                    link.last_sign, link.is_stalled = time.monotonic(), False
                    self.listener.handle(message)
                elif link.num_open and not link.is_stalled and time.monotonic() - link.last_sign > self.stall_seconds:
                    link.is_stalled = True
                    self.listener.give_up(link)
        finally:
            self.link = None
            self.listener.lose(link)
