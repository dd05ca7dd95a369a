"""Engine thread and its asyncio interface: one async generator per request, which owns the request."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from uuid import uuid4

from compress.common.errors import RequestError
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine import NO_OPTIONS, Engine
from runtime.text.grammar import NUM_LANES, CompiledGrammar, lane_of


class _EngineDeadError(Exception):
    """The engine cannot continue a request; `reason` and `error` are set in the last delta of its answers."""

    def __init__(self, reason: FinishReason, error: str) -> None:
        super().__init__(error)
        self.reason, self.error = reason, error


_Item = Delta | _EngineDeadError | RequestError


@dataclass(eq=False, slots=True)
class _RequestStream:
    """Unread deltas of one request, and the error that ends it.

    Attributes:
        loop: event loop that uses the other attributes, unless stated otherwise.
        num_unfinished: number of unfinished answers; used by the engine's thread only.
        grammar: reference that keeps the request's grammar compiled.
        deltas: unread deltas.
        error: reason for the end of the request.
        reader: wakes who waits for anything to read.
        timer: timer that detects stalls.
    """

    loop: asyncio.AbstractEventLoop
    num_unfinished: int
    grammar: CompiledGrammar | None = None
    deltas: list[Delta] = field(default_factory=list)
    error: _EngineDeadError | RequestError | None = None
    reader: asyncio.Future[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def put(self, item: _Item) -> None:
        """Adds a delta or an error."""
        if isinstance(item, Delta):
            self.deltas.append(item)
        else:
            self.error = self.error or item
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def take(self, request_id: str, unfinished: Set[int]) -> list[Delta]:
        """Returns the unread deltas, possibly none; an `_EngineDeadError` ends each answer that has not ended.

        Raises:
            RequestError: the engine rejects the request.
        """
        if self.deltas or self.error is None:
            found, self.deltas = self.deltas, []
            return found
        if isinstance(self.error, RequestError):
            raise self.error
        reason, error = self.error.reason, self.error.error
        return [Delta(request_id, finish_reason=reason, error=error, index=index) for index in sorted(unfinished)]


@dataclass(frozen=True, slots=True)
class _Add:
    """Message that starts a request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    options: RequestOptions
    stream: _RequestStream


@dataclass(frozen=True, slots=True)
class _Abort:
    """Message that aborts the request of a closed stream."""

    request_id: str
    stream: _RequestStream


@dataclass(frozen=True, slots=True)
class _Stop:
    """Message that stops the thread: immediately, or after all requests have ended."""

    when_idle: bool


_Items = Sequence[tuple[_RequestStream, _Item]]


def post(loop: asyncio.AbstractEventLoop, items: _Items) -> bool:
    """Puts items into streams of an event loop from another thread. Returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(_put_all, items)
    except RuntimeError:
        return False
    return True


def _put_all(items: _Items) -> None:
    for stream, item in items:
        stream.put(item)


logger = logging.getLogger("runtime.engine.engine")

WATCH_SLACK_SECONDS = 0.01  # maximum delay of stall detection in seconds

CHECK_SECONDS = 1.0
"""Minimum interval between two checks of an idle engine's bookkeeping."""


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the engine, with the reason if it is unhealthy.

    Attributes:
        seconds_since_progress: duration of the current step so far; 0 when idle.
    """

    healthy: bool
    reason: str
    num_running: int
    num_waiting: int
    seconds_since_progress: float

    @property
    def is_idle(self) -> bool:
        return not self.num_running and not self.num_waiting


class EngineThread:
    """Thread that runs an engine and serves any number of asyncio tasks.

    Only this thread uses the engine; other threads send it messages. It sleeps while there is no work.

    Args:
        engine: engine that this thread uses exclusively.
        stall_seconds: maximum duration of a step; after that `check` reports a stall and waiting requests fail.
        idle_work: called one after the other while there is no request; a request waits for one of them at most.
    """

    def __init__(
        self, engine: Engine, *, stall_seconds: float = 120.0, idle_work: Iterable[Callable[[], object]] = ()
    ) -> None:
        self.engine = engine
        self._idle_work = deque(idle_work)
        self.stall_seconds = stall_seconds
        self._messages: SimpleQueue[_Add | _Abort | _Stop] = SimpleQueue()
        self._streams: dict[str, _RequestStream] = {}
        self._open: set[_RequestStream] = set()  # under the lock: `generate` and `stop` run in different threads
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._compilers = [ThreadPoolExecutor(1, thread_name_prefix="grammar compiler") for _ in range(NUM_LANES)]
        self._lock = threading.Lock()
        self._accepting = False
        self._stop: _Stop | None = None
        self._failure = ""
        self._busy_since: float | None = None
        self._check_due = 0.0
        self._num_checked_steps = 0

    def start(self) -> None:
        """Starts the thread."""
        self._accepting = True
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> bool:
        """Stops the thread after the current step; requests in flight get a last delta with reason `abort` immediately.

        Returns:
            Whether the thread has ended within `timeout` seconds.
        """
        with self._lock:
            self._accepting = False
            for stream in self._open:
                post(stream.loop, [(stream, self._farewell())])
        return self._end_thread(_Stop(when_idle=False), timeout)

    def drain(self, timeout: float) -> bool:
        """Stops accepting requests, waits at most `timeout` seconds for those in flight, then stops the thread.

        Returns:
            Whether all of them were completed.
        """
        return self._end_thread(_Stop(when_idle=True), timeout) or (self.stop() and False)

    def check(self) -> Health:
        """Returns the health of the engine. Any thread may call it."""
        reason = self._fault()
        if not reason and not self.engine.healthy:
            reason = f"the last {self.engine.num_failed_steps} steps failed"
        scheduler = self.engine.scheduler
        return Health(not reason, reason, len(scheduler.running), len(scheduler.waiting), self._step_seconds())

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> AsyncGenerator[list[Delta], None]:
        """Yields the deltas of one request, those of its `n` answers interleaved, until all answers have ended. Those
        that arrived since the last ones come together.

        Closing the generator early frees the request within one step.

        Raises:
            RequestError: the engine rejects the request.
        """
        loop = asyncio.get_running_loop()
        grammars = self.engine.grammars
        if sampling.grammar is None or grammars is None or grammars.find(sampling.grammar):
            compiled = self.engine.check_request(prompt_token_ids, sampling)
        else:  # compiling must block neither the event loop nor the threads that tokenize
            threads = self._compilers[lane_of(sampling.grammar)]
            compiled = await loop.run_in_executor(threads, self.engine.check_request, prompt_token_ids, sampling)
        stream = _RequestStream(loop, sampling.n, compiled)
        request_id = uuid4().hex if request_id is None else request_id
        is_sent = self._send(_Add(request_id, tuple(prompt_token_ids), sampling, options, stream))
        self._watch(request_id, stream)
        unfinished = set(range(sampling.n))
        try:
            while unfinished:
                if not (stream.deltas or stream.error):
                    stream.reader = loop.create_future()
                    await stream.reader
                deltas = stream.take(request_id, unfinished)
                for delta in deltas:
                    if delta.finish_reason is not None:
                        unfinished.remove(delta.index)
                yield deltas
        except RequestError:
            unfinished.clear()  # rejected: the engine has no request, or another one, with this id
            raise
        finally:
            if stream.timer is not None:
                stream.timer.cancel()
            with self._lock:
                self._open.discard(stream)
            if is_sent and unfinished:
                self._messages.put(_Abort(request_id, stream))

    def _send(self, message: _Add) -> bool:
        """Queues a message. Returns False if the thread has stopped accepting requests; the lock ensures that no
        message is queued after its end."""
        with self._lock:
            if self._accepting:
                self._open.add(message.stream)
                self._messages.put(message)
            else:
                message.stream.put(self._farewell())
            return self._accepting

    def _watch(self, request_id: str, stream: _RequestStream) -> None:
        """Fails the request if the engine is dead or stalled; otherwise schedules the next check for when the current
        step would count as stalled. Runs in the event loop."""
        if fault := self._fault():
            stream.put(_EngineDeadError(FinishReason.ERROR, fault))
            self._messages.put(_Abort(request_id, stream))
        else:
            until_stalled = max(self.stall_seconds - self._step_seconds(), 0.0) + WATCH_SLACK_SECONDS
            stream.timer = stream.loop.call_later(until_stalled, self._watch, request_id, stream)

    def _step_seconds(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _fault(self) -> str:
        """Returns the reason why no step will complete, or an empty string."""
        if self._failure:
            return self._failure
        if not self._thread.is_alive():
            return "the engine is not running"
        if (seconds := self._step_seconds()) > self.stall_seconds:
            return f"the engine has made no progress for {seconds:.0f} s"
        return ""

    def _farewell(self) -> _EngineDeadError:
        return _EngineDeadError(FinishReason.ERROR if self._failure else FinishReason.ABORT, self._failure)

    def _end_thread(self, message: _Stop, timeout: float) -> bool:
        with self._lock:
            self._accepting = False
        if self._thread.ident is not None:
            self._messages.put(message)
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_over():
                idle = not self.engine.has_work
                self._handle_messages(wait=idle, timeout=self._use_idle_time() if idle else None)
                if self.engine.has_work:
                    self._busy_since = time.monotonic()
                    self._deliver(self.engine.step())
                self._busy_since = None
        except BaseException as error:  # a bug, or a panic of a library; every request and /health report it
            logger.exception("the engine's thread failed")
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
        self._close()

    def _use_idle_time(self) -> float | None:
        """Does a part of the work for idle time; without any, verifies the bookkeeping.

        Returns:
            Seconds until there is more to do; None without any.
        """
        if not self._idle_work or not self._messages.empty():
            return self._check_idle()
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
        if started < self._check_due or not self._messages.empty():
            return max(0.0, self._check_due - started)
        self.engine.check()
        self._num_checked_steps = num_steps
        # With many blocks a check is slow and may delay a request, so checks use at most 1 % of the time.
        self._check_due = started + max(CHECK_SECONDS, 100 * (time.monotonic() - started))
        return None

    def _is_over(self) -> bool:
        return self._stop is not None and not (self._stop.when_idle and self.engine.has_work)

    def _handle_messages(self, wait: bool, timeout: float | None) -> None:
        """Handles all queued messages; with `wait`, sleeps at most `timeout` seconds until there is one."""
        try:
            message = self._messages.get(wait, timeout)
            while True:
                self._handle(message)
                message = self._messages.get_nowait()
        except Empty:
            return

    def _handle(self, message: _Add | _Abort | _Stop) -> None:
        match message:
            case _Add():
                self._add(message)
            case _Abort():
                # Another request with this id continues: this one was rejected, or has ended.
                if self._streams.get(message.request_id) is message.stream:
                    self._forget(message.request_id)
            case _Stop():
                self._stop = message

    def _add(self, message: _Add) -> None:
        try:
            self.engine.add_request(message.prompt_token_ids, message.sampling, message.request_id, message.options)
        except RequestError as error:
            post(message.stream.loop, [(message.stream, error)])
        else:
            self._streams[message.request_id] = message.stream

    def _forget(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._streams.pop(request_id, None)

    def _deliver(self, deltas: list[Delta]) -> None:
        """Delivers deltas, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_RequestStream, Delta]]] = defaultdict(list)
        for delta in deltas:
            stream = self._streams[delta.request_id]
            by_loop[stream.loop].append((stream, delta))
        undelivered = [delta for loop, items in by_loop.items() if not post(loop, items) for _, delta in items]
        for delta in deltas:
            if delta.finish_reason is not None:
                self._note_end(delta.request_id)
        for delta in undelivered:  # the event loop was closed without closing its generators
            self._forget(delta.request_id)

    def _note_end(self, request_id: str) -> None:
        stream = self._streams[request_id]
        stream.num_unfinished -= 1
        if stream.num_unfinished == 0:
            del self._streams[request_id]

    def _close(self) -> None:
        """Ends all waiting streams, including those with unread messages."""
        with self._lock:
            self._accepting = False
        if not self._failure:
            self.engine.abort_all()
        left = list(self._streams.values())
        while not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, _Add):
                left.append(message.stream)
        for stream in left:
            post(stream.loop, [(stream, self._farewell())])
        self._streams.clear()
