"""The engine's thread, and the asyncio side of it: one async generator per request, which owns that request."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from uuid import uuid4

from compress.checkpoint.errors import RequestError
from runtime.engine import Engine
from runtime.types import Delta, FinishReason, SamplingParams

logger = logging.getLogger("runtime.engine")

Item = tuple[asyncio.Queue, Delta | RequestError]
"""Something for one request, and the queue it goes to."""


@dataclass(eq=False, slots=True)
class Inbox:
    """Where the deltas of one request go: a queue, the event loop it belongs to, and a timer that looks for stalls."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | RequestError]
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request; nobody listens to it any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread: at once, or when all requests have ended."""

    when_idle: bool


@dataclass(frozen=True, slots=True)
class Health:
    """Whether answers can be expected, and why not.

    Attributes:
        seconds_since_progress: how long the present step takes already; 0 while there is nothing to do.
    """

    healthy: bool
    reason: str
    num_running: int
    num_waiting: int
    seconds_since_progress: float


class EngineThread:
    """Runs an engine in a thread of its own and serves any number of asyncio tasks.

    The thread alone touches the engine; everything else sends it messages. Without work it sleeps.

    Args:
        engine: nobody else may use it from now on.
        stall_seconds: a step that takes longer counts as a stall: `check` says so and waiting requests fail.
    """

    def __init__(self, engine: Engine, *, stall_seconds: float = 120.0) -> None:
        self.engine = engine
        self.stall_seconds = stall_seconds
        self._messages: SimpleQueue[Add | Abort | Stop] = SimpleQueue()
        self._inboxes: dict[str, Inbox] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._lock = threading.Lock()
        self._accepting = False
        self._stop: Stop | None = None
        self._failure = ""
        self._busy_since: float | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._accepting = True
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> bool:
        """Ends the thread after the present step; requests in flight get a last delta with reason `abort`.

        Returns:
            Whether the thread has ended within `timeout` seconds.
        """
        return self._end_thread(Stop(when_idle=False), timeout)

    def drain(self, timeout: float) -> bool:
        """Takes no more requests, lets those in flight end for at most `timeout` seconds, then stops.

        Returns:
            Whether all of them came to their own end.
        """
        return self._end_thread(Stop(when_idle=True), timeout) or (self.stop() and False)

    def check(self) -> Health:
        """State of the engine, from any thread."""
        reason = self._fault()
        if not reason and not self.engine.healthy:
            reason = f"the last {self.engine.num_failed_steps} steps failed"
        scheduler = self.engine.scheduler
        return Health(not reason, reason, len(scheduler.running), len(scheduler.waiting), self._step_seconds())

    async def generate(
        self,
        prompt_token_ids: TokenIds[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one request. Closing the generator early, by any way, frees the request within one step.

        Raises:
            RequestError: the engine refuses the request.
        """
        self.engine.check_request(prompt_token_ids, sampling)
        request_id = uuid4().hex if request_id is None else request_id
        inbox = Inbox(asyncio.get_running_loop(), asyncio.Queue())
        if not self._send(Add(request_id, tuple(prompt_token_ids), sampling, cache_salt, inbox)):
            yield self._refusal(request_id)
            return
        self._watch(request_id, inbox)
        ended = False
        try:
            while not ended:
                item = await inbox.queue.get()
                ended = isinstance(item, RequestError) or item.finish_reason is not None
                if isinstance(item, RequestError):
                    raise item
                yield item
        finally:
            if inbox.timer is not None:
                inbox.timer.cancel()
            if not ended:
                self._messages.put(Abort(request_id))

    # --- the asyncio side -----------------------------------------------------------------------------------------

    def _send(self, message: Add) -> bool:
        """False when the thread takes no requests any more; under the lock, so that none is put behind its end."""
        with self._lock:
            if self._accepting:
                self._messages.put(message)
            return self._accepting

    def _watch(self, request_id: str, inbox: Inbox) -> None:
        """Looks now and then whether the engine still lives; if not, the request hears of it. Runs in the loop."""
        if fault := self._fault():
            inbox.queue.put_nowait(Delta(request_id, finish_reason=FinishReason.ERROR, error=fault))
            self._messages.put(Abort(request_id))
        else:
            inbox.timer = inbox.loop.call_later(self.stall_seconds, self._watch, request_id, inbox)

    def _step_seconds(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _fault(self) -> str:
        """Why no step will come to its end, or nothing."""
        if self._failure:
            return self._failure
        if not self._thread.is_alive():
            return "the engine is not running"
        if (seconds := self._step_seconds()) > self.stall_seconds:
            return f"the engine has made no progress for {seconds:.0f} s"
        return ""

    def _refusal(self, request_id: str) -> Delta:
        reason = FinishReason.ERROR if self._failure else FinishReason.ABORT
        return Delta(request_id, finish_reason=reason, error=self._failure)

    def _end_thread(self, message: Stop, timeout: float) -> bool:
        with self._lock:
            self._accepting = False
        if self._thread.ident is not None:
            self._messages.put(message)
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- the engine's side ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._handle_messages(wait=not self.engine.has_work)
                if self.engine.has_work:
                    self._busy_since = time.monotonic()
                    self._deliver(self.engine.step())
                self._busy_since = None
        except Exception as error:  # a bug of the engine: every request must hear of it, and /health
            logger.exception("the engine's thread failed")
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
        self._close()

    def _is_over(self) -> bool:
        return self._stop is not None and not (self._stop.when_idle and self.engine.has_work)

    def _handle_messages(self, wait: bool) -> None:
        """Takes all messages there are; sleeps until there is one if `wait`."""
        try:
            message = self._messages.get(block=wait)
            while True:
                self._handle(message)
                message = self._messages.get_nowait()
        except Empty:
            return

    def _handle(self, message: Add | Abort | Stop) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort():
                self.engine.abort(message.request_id)
                self._inboxes.pop(message.request_id, None)
            case Stop():
                self._stop = message

    def _add(self, message: Add) -> None:
        try:
            self.engine.add_request(
                message.prompt_token_ids, message.sampling, message.request_id, cache_salt=message.cache_salt
            )
        except RequestError as error:
            _post(message.inbox.loop, [(message.inbox.queue, error)])
        else:
            self._inboxes[message.request_id] = message.inbox

    def _deliver(self, deltas: list[Delta]) -> None:
        """Hands deltas over, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Item]] = defaultdict(list)
        for delta in deltas:
            ended = delta.finish_reason is not None
            inbox = self._inboxes.pop(delta.request_id) if ended else self._inboxes[delta.request_id]
            by_loop[inbox.loop].append((inbox.queue, delta))
        for loop, items in by_loop.items():
            if not _post(loop, items):
                self._forget(items)

    def _forget(self, items: list[Item]) -> None:
        """Their event loop was closed without closing its generators: nobody listens any more."""
        for _, item in items:
            if isinstance(item, Delta):
                self._handle(Abort(item.request_id))

    def _close(self) -> None:
        """Tells everybody who still waits, also those whose message was not read."""
        with self._lock:
            self._accepting = False
        lost = [self._refusal(request_id) for request_id in self._inboxes]
        self._deliver(lost if self._failure else self.engine.abort_all())
        while not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, Add):
                _post(message.inbox.loop, [(message.inbox.queue, self._refusal(message.request_id))])


def _post(loop: asyncio.AbstractEventLoop, items: list[Item]) -> bool:
    """Puts items into queues of an event loop from another thread. False when that loop has been closed."""
    try:
        loop.call_soon_threadsafe(_put_all, items)
    except RuntimeError:
        return False
    return True


def _put_all(items: list[Item]) -> None:
    for queue, item in items:
        queue.put_nowait(item)
