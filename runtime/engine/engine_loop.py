"""The loop of an engine and the messages to and from it: plain data, equal in the process of a server and between two.

A client sends `Message`s; the engine answers each step with one call of `Deliver`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from compress.common.errors import RequestError, ToolkitError
from runtime.core.adapter import Adapter
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine import Engine
from runtime.engine.transfer import NO_TRANSFER, Transfer
from runtime.text.grammar import NUM_LANES, CompiledGrammar, lane_of

logger = logging.getLogger("runtime.engine.engine")

CHECK_SECONDS = 1.0
"""Minimum interval between two checks of an idle engine's bookkeeping."""

QUIET_SECONDS = 0.2
"""Time without a step before work for idle time: the next request of a client that sends one after the other does not
wait for it."""

NUM_READERS = 2
"""Threads that read adapters which are not in host memory."""

LOCK_SECONDS = 0.0005
"""Time for which a thread keeps the interpreter lock while another one waits. With Python's default of 5 ms everything
that another thread does could wait that long for a step that launches kernels, and a step for another thread."""


@dataclass(frozen=True, slots=True)
class Add:
    """Message that starts a request.

    Attributes:
        stream: number that a client gives to each request once, while an id may be given again.
        compiled: the compiled grammar, set by the loop; a grammar stays compiled as long as it is referenced.
        adapter: the adapter of the options, which stays in host memory for as long.
    """

    stream: int
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    options: RequestOptions
    compiled: CompiledGrammar | None = None
    adapter: Adapter | None = None

    def failed(self, error: str) -> list[Delta]:
        """Returns the last delta of each answer if the request fails before it starts."""
        reason, indices = FinishReason.ERROR, range(self.sampling.n)
        return [Delta(self.request_id, finish_reason=reason, error=error, index=index) for index in indices]


@dataclass(frozen=True, slots=True)
class Abort:
    """Message that aborts the request of a stream; ignored if the request was rejected or has ended."""

    stream: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Message that ends the loop: immediately, or after all requests have ended."""

    when_idle: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Message from a thread of the same process: work for the engine's thread."""

    work: Callable[[], object]


Message = Add | Abort | Stop | Run


@dataclass(frozen=True, slots=True)
class Status:
    """State of an engine after a step.

    Attributes:
        busy_since: start of the current step in seconds of `time.monotonic`, which processes share; None when idle.
        failure: reason for the end of the loop; empty without a failure.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_failed_steps: int = 0
    busy_since: float | None = None
    failure: str = ""


Events = Sequence[tuple[int, Delta | RequestError]]
"""Results of a step with the number of their stream; an error rejects a request."""

Deliver = Callable[[Events, Status], None]
"""Callback for the events of a step, and for a change of the status. Any thread may call it."""


@dataclass(slots=True)
class _OpenRequest:
    """Stream of a request, and the number of its unfinished answers."""

    stream: int
    num_unfinished: int


class EngineLoop:
    """Runs an engine for any number of requests. Only the thread of `run` uses the engine; others send it messages.

    It sleeps while there is no work.

    Args:
        engine: engine that this loop uses exclusively.
        deliver: receives events and status.
        idle_work: called one after the other before the first request, and while there was no step for `QUIET_SECONDS`;
            a request waits for one of them at most.

    Attributes:
        messages: messages that `run` has not read yet.
        status: the last one that was delivered.
        transfer: exchanges pages with other engines.
    """

    def __init__(self, engine: Engine, deliver: Deliver, idle_work: Iterable[Callable[[], object]] = ()) -> None:
        self.engine = engine
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.status = Status()
        self.transfer: Transfer = NO_TRANSFER
        self._deliver = deliver
        self._idle_work = deque(idle_work)
        self._requests: dict[str, _OpenRequest] = {}
        self._compilers = [ThreadPoolExecutor(1, thread_name_prefix="grammar compiler") for _ in range(NUM_LANES)]
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="adapter reader")
        self._checking: set[int] = set()
        self._lock, self._arriving = threading.Lock(), threading.RLock()  # who is delivered to may send
        self._stop: Stop | None = None
        self._check_due = 0.0
        self._num_checked_steps = 0
        self._last_step = -QUIET_SECONDS

    def put(self, *messages: Message) -> None:
        """Sends messages; an idle engine starts on all of them together. Any thread may call it.

        A request is validated first; a new grammar is compiled, and an adapter read, in a thread, which delays neither
        the caller nor steps.
        """
        with self._arriving:
            for message in messages:
                self._put(message)

    def _put(self, message: Message) -> None:
        if isinstance(message, Add):
            grammar, grammars = message.sampling.grammar, self.engine.grammars
            self._checking.add(message.stream)
            if self._must_read(message.options.adapter):
                self._readers.submit(self._admit, message)
            elif grammar is None or grammars is None or grammars.find(grammar):
                self._admit(message)
            else:
                self._compilers[lane_of(grammar)].submit(self._admit, message)
            return
        with self._lock:
            if not (isinstance(message, Abort) and self._end_check(message.stream)):
                self.messages.put(message)

    def change_adapters(self, name: str, path: Path | None) -> Future[ToolkitError | None]:
        """Loads the adapter of a folder in a thread, or unloads one without a folder; returns the error, if there is
        one."""
        return self._readers.submit(self._change_adapters, name, path)

    def _change_adapters(self, name: str, path: Path | None) -> ToolkitError | None:
        adapters = self.engine.adapters
        try:
            if adapters is None:
                raise RequestError("this engine serves no adapters", "Start it with --enable-lora")
            adapters.unload(name) if path is None else adapters.load(name, path)
        except ToolkitError as error:
            return error
        except Exception as error:  # a damaged file may raise anything; the engine does not depend on it
            logger.exception("adapter %s could not be changed", name)
            return ToolkitError(f"adapter {name!r}: {type(error).__name__}: {error}")
        return None

    def _must_read(self, adapter: str) -> bool:
        """Returns whether an adapter is not in host memory."""
        adapters = self.engine.adapters
        return bool(adapter) and adapters is not None and adapters.find(adapter) is None

    def run(self) -> None:
        """Steps until a message or a failure ends the loop; `status` has the reason of a failure."""
        sys.setswitchinterval(LOCK_SECONDS)
        try:
            while not self._is_over():
                if is_idle := not self.engine.has_work:
                    self._publish()
                self._handle_messages(wait=is_idle, timeout=self._use_idle_time() if is_idle else None)
                if self.engine.has_work:
                    if is_idle:
                        self._publish()
                    events = self._addressed(self.engine.step())
                    self.transfer.note_events(events)
                    self._publish(events)
                    self._last_step = time.monotonic()
            self.engine.abort_all()
            self._publish()
        except BaseException as error:  # a bug, or a panic of a library; every request and /health report it
            logger.exception("the engine's loop failed")
            self.status = Status(failure=f"the engine failed: {type(error).__name__}: {error}")
            self._tell((), self.status)

    def _tell(self, events: Events, status: Status) -> None:
        self._deliver(self.transfer.others(events) if events else events, status)

    def _admit(self, request: Add) -> None:
        """Validates a request, and sends it to `run` or rejects it, unless it was aborted meanwhile."""
        compiled: CompiledGrammar | None = None
        adapter: Adapter | None = None
        events: Events = ()
        try:
            adapter = self.engine.open_adapter(request.options.adapter)
            compiled = self.engine.check_request(request.prompt_token_ids, request.sampling)
        except RequestError as error:
            events = [(request.stream, error)]
        except BaseException as error:  # a panic of the library that compiles grammars
            logger.exception("request %s could not be checked", request.request_id)
            events = [(request.stream, delta) for delta in request.failed(f"{type(error).__name__}: {error}")]
        with self._lock:
            if not self._end_check(request.stream):
                return
            if not events:
                found = compiled is not None or adapter is not None
                self.messages.put(replace(request, compiled=compiled, adapter=adapter) if found else request)
        if events:
            self._tell(events, self.status)

    def _end_check(self, stream: int) -> bool:
        """Notes that a request is validated no longer. Returns False if it was not. Needs the lock."""
        try:
            self._checking.remove(stream)
        except KeyError:
            return False
        return True

    def _use_idle_time(self) -> float | None:
        """Does a part of the work for idle time; without any, verifies the bookkeeping.

        Returns:
            Seconds until there is more to do; None without any.
        """
        if not self._idle_work or not self.messages.empty():
            return self._check_idle()
        if (remaining := self._last_step + QUIET_SECONDS - time.monotonic()) > 0:
            return remaining
        try:
            self._idle_work.popleft()()
        except Exception:  # a kernel may raise any exception; no request depends on this work
            logger.exception("work in idle time failed; the rest of it is left out")
            self._idle_work.clear()
        return 0.0

    def _check_idle(self) -> float | None:
        """Verifies the bookkeeping while the engine is idle.

        Returns:
            Seconds until the next check; None if no step was computed since the last one.
        """
        num_steps = self.engine.metrics.steps_total
        if num_steps == self._num_checked_steps:
            return None
        started = time.monotonic()
        if started < self._check_due or not self.messages.empty():
            return max(0.0, self._check_due - started)
        self.engine.check()
        self._num_checked_steps = num_steps
        # With many blocks a check is slow and may delay a request, so checks use at most 1 % of the time.
        self._check_due = started + max(CHECK_SECONDS, 100 * (time.monotonic() - started))
        return None

    def _is_over(self) -> bool:
        has_work = self.engine.has_work or self.transfer.num_waiting
        return self._stop is not None and not (self._stop.when_idle and has_work)

    def _handle_messages(self, wait: bool, timeout: float | None) -> None:
        """Handles all queued messages; with `wait`, sleeps at most `timeout` seconds until there is one."""
        try:
            message = self.messages.get(wait, timeout)
            if wait:
                with self._arriving:  # what was sent with the message follows
                    pass
            while True:
                self._handle(message)
                message = self.messages.get_nowait()
        except Empty:
            return

    def _handle(self, message: Message) -> None:
        match message:
            case Add():
                if not self.transfer.takes(message):
                    self.add(message)
            case Run():
                message.work()
            case Abort():
                self.transfer.abort(message.stream)
                # Another request with this id continues: this one was rejected, or has ended.
                found = self._requests.get(message.request_id)
                if found is not None and found.stream == message.stream:
                    self.engine.abort(message.request_id)
                    del self._requests[message.request_id]
            case Stop():
                self._stop = message

    def add(self, request: Add) -> bool:
        """Adds a request to the engine; the engine's thread calls it. Returns False if the engine rejects it."""
        try:
            self.engine.add_request(request.prompt_token_ids, request.sampling, request.request_id, request.options)
        except RequestError as error:
            self._tell([(request.stream, error)], self.status)
            return False
        self._requests[request.request_id] = _OpenRequest(request.stream, request.sampling.n)
        return True

    def _addressed(self, deltas: list[Delta]) -> Events:
        """Returns deltas with their streams, and forgets requests that have ended."""
        events = [(self._requests[delta.request_id].stream, delta) for delta in deltas]
        for delta in deltas:
            if delta.finish_reason is not None:
                request = self._requests[delta.request_id]
                request.num_unfinished -= 1
                if request.num_unfinished == 0:
                    del self._requests[delta.request_id]
        return events

    def _publish(self, events: Events = ()) -> None:
        """Delivers events, and the status if it has changed."""
        scheduler = self.engine.scheduler
        since = time.monotonic() if self.engine.has_work else None
        num_waiting = len(scheduler.waiting) + self.transfer.num_waiting
        status = Status(len(scheduler.running), num_waiting, self.engine.num_failed_steps, since)
        if events or status != self.status:
            self.status = status
            self._tell(events, status)
