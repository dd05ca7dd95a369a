"""Engine in a process of its own: messages cross a socket that only both processes have, those of a step as one.

So what serves requests (HTTP, JSON, templates, texts) takes nothing of the interpreter that schedules and launches
steps. Only this toolkit's own process is at the other end, so messages are pickled.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import ProcessCollector

from compress.common.errors import ToolkitError
from runtime.core.request import Delta
from runtime.engine.engine_client import SingleEngineClient
from runtime.engine.engine_loop import EngineLoop, Events, Message, Status
from runtime.engine.metrics import Labelled, engine_label, render
from runtime.engine.wire import LENGTH, READ_BYTES, describe_end, frame, receive
from runtime.text.tokenizer import Tokenizer

METRICS_SECONDS = 5.0
"""Maximum wait for the engine's metrics; `/metrics` lacks them after that."""


@dataclass(frozen=True, slots=True)
class RenderMetrics:
    """Message that asks for the engine's metrics; the answer is a string. Its fields are those of `Metrics.render`."""

    model_name: str
    engine: str


@dataclass(frozen=True, slots=True)
class ChangeAdapters:
    """Message that loads an adapter, or unloads one without a path; the answer is `AdaptersChanged`."""

    number: int
    name: str
    path: Path | None


@dataclass(frozen=True, slots=True)
class AdaptersChanged:
    """Answer to the message of a number."""

    number: int
    error: ToolkitError | None


Sent = Message | RenderMetrics | ChangeAdapters
"""Messages to the engine's process."""


def packed(events: Events, status: Status) -> tuple[Status, list[int], Events]:
    """Returns a step's events in the form in which they are pickled fastest: a single token without anything else, by
    far the most frequent event, as four numbers."""
    tokens: list[int] = []
    others: list[Any] = []
    for event in events:
        number, item = event
        if isinstance(item, Delta) and _is_one_token(item):
            tokens += (number, item.index, item.num_output_tokens, item.token_ids[0])
        else:
            others.append(event)
    return status, tokens, others


def _is_one_token(delta: Delta) -> bool:
    is_inner = delta.num_output_tokens > 1 and delta.finish_reason is None
    return is_inner and len(delta.token_ids) == 1 and not (delta.text or delta.logprobs)


class EnginePort:
    """The engine's end of the socket.

    Args:
        end: file descriptor.

    Attributes:
        loop: the engine's loop, once it is loaded; messages wait for it.
    """

    def __init__(self, end: int) -> None:
        self.loop: Future[EngineLoop] = Future()
        self._socket = socket.socket(fileno=end)
        self._lock = threading.Lock()
        self._process_metrics = ProcessCollector(namespace="engine", registry=None)

    def receive(self) -> Any:
        """Returns the next message. Raises EOFError if the other end is closed."""
        return receive(self._socket)

    def send(self, message: Any) -> None:
        """Sends a message. Any thread may call it."""
        content = frame(message)
        with self._lock:
            try:
                self._socket.sendall(content)
            except ConnectionError:
                os._exit(1)

    def deliver(self, events: Events, status: Status) -> None:
        """Sends the events of a step."""
        self.send(packed(events, status))

    def listen(self) -> None:
        """Starts a thread that handles messages. When the other end is closed it ends this process at once."""
        threading.Thread(target=self._listen, name="engine port", daemon=True).start()

    def _listen(self) -> None:
        with suppress(EOFError):
            while True:
                messages = self.receive()
                loop = self.loop.result()
                loop.put(*(each for each in messages if not isinstance(each, RenderMetrics | ChangeAdapters)))
                for each in messages:
                    if isinstance(each, RenderMetrics):
                        process = render(Labelled(self._process_metrics, engine_label(each.engine)))
                        self.send(loop.engine.render_metrics(each.model_name, each.engine) + process)
                    elif isinstance(each, ChangeAdapters):
                        changing = loop.change_adapters(each.name, each.path)
                        changing.add_done_callback(partial(self._tell_change, each.number))
        os._exit(1)

    def _tell_change(self, number: int, changing: Future[ToolkitError | None]) -> None:
        self.send(AdaptersChanged(number, changing.result()))


class EngineProcess(SingleEngineClient):
    """Engine at the other end of a socket, where `EnginePort` is. Serves one event loop, that of `start`.

    Args:
        process: the engine's process.
        connection: this end of the socket.
        tokenizer, eos_token_ids, stall_seconds: as for `SingleEngineClient`.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        tokenizer: Tokenizer | None,
        eos_token_ids: Set[int],
        stall_seconds: float = 120.0,
    ) -> None:
        super().__init__(tokenizer, eos_token_ids, stall_seconds)
        self.process = process
        self._socket = connection
        self._is_connected = False
        self._messages: list[Sent] = []
        self._unread, self._unsent = bytearray(), bytearray()
        self._renderings: deque[asyncio.Future[str]] = deque()
        self._changes: dict[int, asyncio.Future[ToolkitError | None]] = {}

    def start(self) -> None:
        self._event_loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._socket.setblocking(False)
        self._event_loop.add_reader(self._socket, self._read)
        self._accepting = self._is_connected = True

    def stop(self, timeout: float = 30.0) -> bool:
        has_ended = super().stop(timeout)
        if not has_ended:
            self.process.kill()
            self.process.wait()
        return has_ended

    async def render_metrics(self, model_name: str = "", engine: str = "") -> str:
        if not self._is_connected:
            return ""
        self._renderings.append(rendering := self._event_loop.create_future())
        self._put(RenderMetrics(model_name, engine))
        try:
            return await asyncio.wait_for(rendering, METRICS_SECONDS)
        except TimeoutError:
            return ""

    async def change_adapters(self, name: str, path: Path | None) -> None:
        if not self._is_connected:
            raise ToolkitError("the engine is not running", "Start the server again")
        self._changes[number := next(self._numbers)] = change = self._event_loop.create_future()
        self._put(ChangeAdapters(number, name, path))
        if error := await change:
            raise error

    def _is_running(self) -> bool:
        return self._is_connected

    def _join(self, timeout: float) -> bool:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _put(self, message: Sent) -> None:
        if threading.get_ident() == self._thread_id:
            self._queue(message)
        else:
            with suppress(RuntimeError):  # the event loop is closed
                self._event_loop.call_soon_threadsafe(self._queue, message)

    def _queue(self, message: Sent) -> None:
        """Sends a message with others of this turn of the event loop."""
        if not self._messages:
            self._event_loop.call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        """Sends the messages, without waiting for room in the socket."""
        content, self._messages = frame(self._messages) if self._messages else b"", []
        if not (content and self._is_connected):
            return
        self._unsent += content
        if len(self._unsent) == len(content):  # else the event loop waits for room already
            self._send()
            if self._unsent:
                self._event_loop.add_writer(self._socket, self._send_rest)

    def _send_rest(self) -> None:
        self._send()
        if not self._unsent:
            self._event_loop.remove_writer(self._socket)

    def _send(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # `_read` finds out
            sent = len(self._unsent)
        del self._unsent[:sent]

    def _read(self) -> None:
        try:
            part = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._note_end()
            return
        self._unread += part
        while len(self._unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                return
            message = pickle.loads(bytes(self._unread[LENGTH.size : end]))
            del self._unread[:end]
            self._handle(message)

    def _handle(self, message: str | AdaptersChanged | tuple[Status, list[int], Events]) -> None:
        if isinstance(message, AdaptersChanged):
            change = self._changes.pop(message.number)
            if not change.done():
                change.set_result(message.error)
            return
        if isinstance(message, str):
            rendering = self._renderings.popleft()
            if not rendering.done():
                rendering.set_result(message)
            return
        self._status, tokens, others = message
        numbers = iter(tokens)
        for number, index, num_output_tokens, token_id in zip(numbers, numbers, numbers, numbers, strict=True):
            if stream := self._streams.get(number):
                stream.put(
                    Delta(stream.request_id, token_ids=[token_id], num_output_tokens=num_output_tokens, index=index)
                )
        for number, item in others:
            if stream := self._streams.get(number):
                stream.put(item)

    def _note_end(self) -> None:
        """Ends all requests after the end of the process, which is a failure unless it was stopped."""
        self._event_loop.remove_reader(self._socket)
        self._event_loop.remove_writer(self._socket)
        self._is_connected = False
        if self._accepting and not self._status.failure:
            self._status = Status(failure=f"the engine's process {describe_end(self.process)}")
        self._status = replace(self._status, busy_since=None, num_running=0, num_waiting=0)
        self._dismiss_all()
        for change in self._changes.values():
            if not change.done():
                change.set_result(ToolkitError("the engine has ended", "Start the server again"))
        for rendering in self._renderings:
            if not rendering.done():
                rendering.set_result("")
