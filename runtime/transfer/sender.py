"""The engine that computes prompts: sends their pages to the engines that ask for them, while it goes on computing.

A thread copies the pages of a step while the next one is computed. Until then they are lent, so nothing overwrites
them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

from compress.common.errors import RequestError, ToolkitError
from runtime.core.request import FinishReason, SamplingParams
from runtime.engine.engine_loop import Abort, Add, EngineLoop, Events, Run
from runtime.engine.transfer import Transfer
from runtime.engine.wire import receive, send
from runtime.transfer.connector import CONNECTORS, Remote
from runtime.transfer.memory import Parts, host_shapes
from runtime.transfer.messages import (
    PAGES,
    STATES,
    Alive,
    Arrived,
    Ended,
    Hello,
    Unwanted,
    Wanted,
    Welcome,
    limit_sends,
)

logger = logging.getLogger("runtime.transfer.sender")

ALIVE_SECONDS = 1.0
"""Interval at which receivers are told that a long prompt is being computed."""

SEND_SECONDS = 10
"""Maximum wait for a receiver that reads nothing; its connection ends after that."""

PROMPT_ONLY = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Loan:
    """A row of this engine, on its way to a slot of a receiver."""

    block_hash: bytes
    slot: int
    row: int


@dataclass(eq=False, slots=True)
class Receiver:
    """Connection of an engine that asks for pages."""

    connection: socket.socket
    remote: Remote
    is_open: bool = True

    def send(self, message: Any) -> None:
        """Sends a message. Raises OSError if the receiver is gone, or reads nothing."""
        send(self.connection, message)

    def close(self) -> None:
        """Ends the connection, which tells the receiver that nothing more is written."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False, slots=True)
class Job:
    """A prompt that is computed for a receiver.

    Attributes:
        missing: slots by hash and kind of memory, of what was not found yet.
    """

    receiver: Receiver
    wanted: Wanted
    request_id: str = field(default_factory=lambda: uuid4().hex)
    missing: dict[str, dict[bytes, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = {kind: dict(slots) for kind, slots in self.wanted.slots.items()}


class PageSender(Transfer):
    """Computes prompts for other engines and sends them the pages.

    Args:
        loop: loop of this engine.
        parts: memory of this engine.
        model: as in `Hello`.
        path: Unix socket to listen on, for this user only.

    Raises:
        ToolkitError: another process listens there, or the path is not usable.
    """

    def __init__(self, loop: EngineLoop, parts: Parts, model: str, path: Path) -> None:
        self.loop, self.parts, self.model = loop, parts, model
        self._jobs: dict[int, Job] = {}
        self._streams = count(-1, -1)  # those of clients count up from 0
        self._copies: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._alive_due = 0.0
        self._listener = listen(path)
        for work in (self._accept, self._copy_forever):
            threading.Thread(target=work, name="page sender", daemon=True).start()

    def note_events(self, events: Events) -> None:
        for job in self._jobs.values():
            self._lend(job)
        if self._jobs and time.monotonic() > self._alive_due:
            self._alive_due = time.monotonic() + ALIVE_SECONDS
            for receiver in {job.receiver for job in self._jobs.values()}:
                self._copies.put(partial(self._tell, receiver, Alive()))

    def others(self, events: Events) -> Events:
        for stream, item in events:
            if stream >= 0:
                continue
            if isinstance(item, RequestError):
                self.loop.put(Run(partial(self._finish, stream, str(item))))
            elif item.finish_reason is not None:
                error = "" if item.finish_reason is FinishReason.LENGTH else item.error or item.finish_reason
                self.loop.put(Run(partial(self._finish, stream, error)))
        return [event for event in events if event[0] >= 0]

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            limit_sends(connection, SEND_SECONDS)
            threading.Thread(target=self._serve, args=(connection,), name="page sender", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Reads the messages of a receiver until it is gone."""
        with suppress(EOFError, OSError):
            hello: Hello = receive(connection)
            error = self._refusal(hello)
            send(connection, Welcome(error))
            if error:
                connection.close()
                return
            receiver = Receiver(connection, CONNECTORS[hello.connector].accept(connection, hello.shapes))
            try:
                while True:
                    self._read(receiver, receive(connection))
            finally:
                self._drop(receiver)

    def _refusal(self, hello: Hello) -> str:
        if hello.connector not in CONNECTORS:
            return f"there is no connector {hello.connector!r} here"
        if reason := CONNECTORS[hello.connector].unsupported_reason():
            return reason
        if hello.model != self.model:
            return f"this engine computes {self.model}, the other one {hello.model}"
        own = {name: (each.shape, each.dtype) for name, each in host_shapes(self.parts).items()}
        if own != {name: (each.shape, each.dtype) for name, each in hello.shapes.items()}:
            return "the two engines store pages in different layouts"
        return ""

    def _read(self, receiver: Receiver, message: Wanted | Unwanted) -> None:
        if isinstance(message, Wanted):
            self.loop.put(Run(partial(self._begin, Job(receiver, message))))
        else:
            self.loop.put(Run(partial(self._abort, receiver, message.number)))

    def _begin(self, job: Job) -> None:
        """Starts a prompt, unless all of it is known."""
        self._jobs[stream := next(self._streams)] = job
        self._lend(job)
        if not any(job.missing.values()):
            self._finish(stream)
            return
        wanted = job.wanted
        self.loop.put(Add(stream, job.request_id, wanted.token_ids, PROMPT_ONLY, wanted.options))

    def _abort(self, receiver: Receiver, number: int | None) -> None:
        """Ends a prompt of a receiver, or all of them."""
        for stream, job in list(self._jobs.items()):
            if job.receiver is receiver and number in (None, job.wanted.number):
                self.loop.put(Abort(stream, job.request_id))
                self._finish(stream, "no longer wanted")

    def _drop(self, receiver: Receiver) -> None:
        """Ends a connection once neither the engine's thread nor that of copies writes to the receiver's slots."""
        receiver.is_open = False
        self.loop.put(Run(partial(self._leave, receiver)))

    def _leave(self, receiver: Receiver) -> None:
        self._abort(receiver, None)
        self._copies.put(receiver.close)

    def _finish(self, stream: int, error: str = "") -> None:
        """Tells a receiver that a prompt has ended, after its pages; a second call has no effect."""
        job = self._jobs.pop(stream, None)
        if job is not None:
            self._copies.put(partial(self._tell, job.receiver, Ended(job.wanted.number, error)))

    def _lend(self, job: Job) -> None:
        """Lends the pages that are known by now of a job, and has them copied; copies the state, of which there is one
        for many pages, at once."""
        scheduler = self.loop.engine.scheduler
        if loans := _found(job.missing[PAGES], scheduler.blocks.lend):
            self._copies.put(partial(self._copy_pages, job, loans))
        if scheduler.states is not None and (loans := _found(job.missing[STATES], scheduler.states.pool.find)):
            self._write(job.receiver, STATES, loans)
            self._copies.put(partial(self._tell, job.receiver, _arrived(job, STATES, loans)))

    def _copy_forever(self) -> None:
        while True:
            self._copies.get()()

    def _copy_pages(self, job: Job, loans: Sequence[Loan]) -> None:
        """Copies pages, and gives them back whatever happens."""
        if self._write(job.receiver, PAGES, loans):
            self._tell(job.receiver, _arrived(job, PAGES, loans))
        self.loop.put(Run(partial(self._take_back, loans)))

    def _write(self, receiver: Receiver, kind: str, loans: Sequence[Loan]) -> bool:
        """Writes rows, one part of all of them after the other. Returns False if the receiver is gone."""
        try:
            for name, part in self.parts.items() if receiver.is_open else ():
                for loan in loans if part.kind == kind else ():
                    receiver.remote.write(name, loan.slot, part.rows[loan.row])
            receiver.remote.flush()
        except Exception:  # a kernel or a connector may raise anything; the receiver computes the prompt itself
            logger.exception("pages could not be sent; the connection ends")
            self._drop(receiver)
        return receiver.is_open

    def _take_back(self, loans: Sequence[Loan]) -> None:
        engine = self.loop.engine
        engine.scheduler.blocks.take_back([loan.row for loan in loans])
        engine.metrics.transferred_blocks_total += len(loans)

    def _tell(self, receiver: Receiver, message: Any) -> None:
        if receiver.is_open:
            try:
                receiver.send(message)
            except OSError:
                self._drop(receiver)


def _found(missing: dict[bytes, int], find: Callable[[bytes], int | None]) -> list[Loan]:
    """Returns what is found of slots by hash, and removes it there."""
    rows = [(block_hash, find(block_hash)) for block_hash in missing]
    return [Loan(block_hash, missing.pop(block_hash), row) for block_hash, row in rows if row is not None]


def _arrived(job: Job, kind: str, loans: Sequence[Loan]) -> Arrived:
    return Arrived(job.wanted.number, kind, [loan.block_hash for loan in loans])


def listen(path: Path) -> socket.socket:
    """Listens on a Unix socket that only this user can open; one without a listener is replaced.

    Raises:
        ToolkitError: another process listens there, or the path is not usable.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as other, suppress(FileNotFoundError, ConnectionRefusedError):
            other.connect(str(path))
            raise ToolkitError(f"another engine listens on {path}", "Use another --transfer-socket")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        problem = f"{path} cannot be listened on: {error.strerror or error}"
        raise ToolkitError(problem, "Use a short path in an existing folder of yours") from error
    return listener
