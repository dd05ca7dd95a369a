"""Asyncio interface of an engine, wherever it runs: one async generator per request, which owns the request."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from uuid import uuid4

from compress.common.errors import RequestError
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine import NO_OPTIONS, UNHEALTHY_AFTER
from runtime.engine.engine_loop import Abort, Add, Message, Status, Stop
from runtime.engine.output_processor import end_tokens
from runtime.text.tokenizer import Detokenizer, Tokenizer

WATCH_SLACK_SECONDS = 0.01  # maximum delay of stall detection in seconds


class _EngineDeadError(Exception):
    """The engine cannot continue a request; `reason` and `error` are set in the last delta of its answers."""

    def __init__(self, reason: FinishReason, error: str) -> None:
        super().__init__(error)
        self.reason, self.error = reason, error


Item = Delta | _EngineDeadError | RequestError


class AnswerTexts:
    """Texts of the answers to a request, converted by its reader so that the engine is not delayed.

    Args:
        end_token_ids: tokens that end an answer; they have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], sampling: SamplingParams, end_token_ids: Set[int]
    ) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._options = {} if sampling.skip_special_tokens else {"skip_special_tokens": False}
        self._silent = frozenset() if sampling.include_stop else end_token_ids
        self._answers: dict[int, Detokenizer] = {}

    def write(self, delta: Delta) -> None:
        """Sets the text of a delta."""
        answer = self._answers.get(delta.index)
        if answer is None and delta.token_ids:
            self._answers[delta.index] = answer = self._tokenizer.detokenizer(self._prompt, **self._options)
        if answer is not None:
            delta.text = "".join(answer.push(token) for token in delta.token_ids if token not in self._silent)
            if delta.finish_reason is not None:
                delta.text += answer.flush()


@dataclass(eq=False, slots=True)
class RequestStream:
    """Unread deltas of one request, and the error that ends it. Used in its event loop, except for `loop`.

    Attributes:
        texts: writes the texts of deltas; None where the engine does.
        deltas: unread deltas.
        error: reason for the end of the request.
        reader: wakes who waits for anything to read.
        timer: timer that detects stalls.
    """

    loop: asyncio.AbstractEventLoop
    request_id: str
    texts: AnswerTexts | None = None
    deltas: list[Delta] = field(default_factory=list)
    error: _EngineDeadError | RequestError | None = None
    reader: asyncio.Future[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def put(self, item: Item) -> None:
        """Adds a delta or an error."""
        if isinstance(item, Delta):
            self.deltas.append(item)
        else:
            self.error = self.error or item
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def take(self, unfinished: Set[int]) -> list[Delta]:
        """Returns the unread deltas, possibly none; an `_EngineDeadError` ends each answer that has not ended.

        Raises:
            RequestError: the engine rejects the request.
        """
        if self.deltas or self.error is None:
            found, self.deltas = self.deltas, []
            if self.texts is not None:
                for delta in found:
                    self.texts.write(delta)
            return found
        if isinstance(self.error, RequestError):
            raise self.error
        reason, error = self.error.reason, self.error.error
        return [Delta(self.request_id, finish_reason=reason, error=error, index=index) for index in sorted(unfinished)]


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the engine, with the reason if it is unhealthy.

    Attributes:
        seconds_since_progress: duration of the current step so far; 0 when idle.
        has_ended: whether the engine has ended by a failure, so that it never becomes healthy again.
    """

    healthy: bool
    reason: str
    num_running: int
    num_waiting: int
    seconds_since_progress: float
    has_ended: bool = False

    @property
    def is_idle(self) -> bool:
        return not self.num_running and not self.num_waiting


def join_health(states: Mapping[str, Health]) -> Health:
    """Returns the health of several engines, with the reason of the one that has ended, else of the first that is
    unhealthy.

    Args:
        states: health of each by what the reason calls it.
    """
    troubles = sorted(states.items(), key=lambda each: (not each[1].has_ended, each[1].healthy))
    name, worst = troubles[0]
    return Health(
        worst.healthy,
        "" if worst.healthy else f"{name}: {worst.reason}",
        sum(state.num_running for state in states.values()),
        sum(state.num_waiting for state in states.values()),
        max(state.seconds_since_progress for state in states.values()),
        worst.has_ended,
    )


class EngineClient(ABC):
    """Serves an engine, or several, to any number of asyncio tasks."""

    @abstractmethod
    def start(self) -> None:
        """Starts to serve."""

    @abstractmethod
    def stop(self, timeout: float = 30.0) -> bool:
        """Stops the engine after the current step; requests in flight get a last delta with reason `abort` immediately.

        Returns:
            Whether it has ended within `timeout` seconds.
        """

    @abstractmethod
    def check(self) -> Health:
        """Returns the health of the engine. Any thread may call it."""

    @abstractmethod
    async def render_metrics(self, model_name: str = "", engine: str = "") -> str:
        """Renders the engine's metrics in Prometheus' text format, labelled by the model's name, and by the name of
        this engine if there is one."""

    @abstractmethod
    def generate(
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

    @abstractmethod
    async def change_adapters(self, name: str, path: Path | None) -> None:
        """Loads the LoRA adapter of a folder, or unloads one without a folder. Raises ToolkitError if that fails;
        nothing has changed then."""


class SingleEngineClient(EngineClient):
    """Serves one engine. Subclasses say where it runs.

    Args:
        tokenizer: tokenizer; None leaves texts to the engine.
        eos_token_ids: end tokens of the model.
        stall_seconds: maximum duration of a step; after that `check` reports a stall and waiting requests fail.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Set[int], stall_seconds: float = 120.0) -> None:
        self.stall_seconds = stall_seconds
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._status = Status()
        self._numbers = count()
        self._streams: dict[int, RequestStream] = {}
        self._lock = threading.Lock()
        self._accepting = False

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @abstractmethod
    def _put(self, message: Message) -> None:
        """Sends a message to the engine's loop. Any thread may call it."""

    @abstractmethod
    def _is_running(self) -> bool:
        """Returns whether the engine's loop runs."""

    @abstractmethod
    def _join(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the end of the loop, and returns whether it has ended."""

    def stop(self, timeout: float = 30.0) -> bool:
        self._dismiss_all()
        return self._end(Stop(when_idle=False), timeout)

    def drain(self, timeout: float) -> bool:
        """Stops accepting requests, waits at most `timeout` seconds for those in flight, then stops the engine.

        Returns:
            Whether all of them were completed.
        """
        return self._end(Stop(when_idle=True), timeout) or (self.stop() and False)

    def check(self) -> Health:
        status, reason = self._status, self._fault()
        if not reason and status.num_failed_steps >= UNHEALTHY_AFTER:
            reason = f"the last {status.num_failed_steps} steps failed"
        counts = status.num_running, status.num_waiting
        return Health(not reason, reason, *counts, self._step_seconds(), has_ended=bool(status.failure))

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> AsyncGenerator[list[Delta], None]:
        number, stream = next(self._numbers), RequestStream(asyncio.get_running_loop(), request_id or uuid4().hex)
        if self._tokenizer is not None and not sampling.stop:
            ends = end_tokens(sampling, self._eos_token_ids)
            stream.texts = AnswerTexts(self._tokenizer, prompt_token_ids, sampling, ends)
            options = replace(options, detokenize=False)
        message = Add(number, stream.request_id, prompt_token_ids, sampling, options)
        is_sent = self._open(stream, message)
        self._watch(number, stream)
        unfinished = set(range(sampling.n))
        try:
            while unfinished:
                if not (stream.deltas or stream.error):
                    stream.reader = stream.loop.create_future()
                    await stream.reader
                deltas = stream.take(unfinished)
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
            self._streams.pop(number, None)
            if is_sent and unfinished:
                self._put(Abort(number, stream.request_id))

    def _open(self, stream: RequestStream, message: Add) -> bool:
        """Sends a request. Returns False if the engine has stopped accepting requests; the lock ensures that none is
        sent after its end."""
        with self._lock:
            if self._accepting:
                self._streams[message.stream] = stream
                self._put(message)
            else:
                stream.put(self._farewell())
            return self._accepting

    def _watch(self, number: int, stream: RequestStream) -> None:
        """Fails the request if the engine is dead or stalled; otherwise schedules the next check for when the current
        step would count as stalled. Runs in the event loop."""
        if fault := self._fault():
            stream.put(_EngineDeadError(FinishReason.ERROR, fault))
            self._put(Abort(number, stream.request_id))
        else:
            until_stalled = max(self.stall_seconds - self._step_seconds(), 0.0) + WATCH_SLACK_SECONDS
            stream.timer = stream.loop.call_later(until_stalled, self._watch, number, stream)

    def _step_seconds(self) -> float:
        since = self._status.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _fault(self) -> str:
        """Returns the reason why no step will complete, or an empty string."""
        if self._status.failure:
            return self._status.failure
        if not self._is_running():
            return "the engine is not running"
        if (seconds := self._step_seconds()) > self.stall_seconds:
            return f"the engine has made no progress for {seconds:.0f} s"
        return ""

    def _farewell(self) -> _EngineDeadError:
        failure = self._status.failure
        return _EngineDeadError(FinishReason.ERROR if failure else FinishReason.ABORT, failure)

    def _dismiss_all(self) -> None:
        """Ends all streams, and accepts no more."""
        with self._lock:
            self._accepting = False
            for stream in list(self._streams.values()):
                post(stream.loop, [(stream, self._farewell())])

    def _end(self, message: Stop, timeout: float) -> bool:
        with self._lock:
            self._accepting = False
        if self._is_running():
            self._put(message)
        return self._join(timeout)


def post(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[RequestStream, Item]]) -> bool:
    """Puts items into streams of an event loop from another thread. Returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(put_all, items)
    except RuntimeError:
        return False
    return True


def put_all(items: Sequence[tuple[RequestStream, Item]]) -> None:
    """Puts items into streams."""
    for stream, item in items:
        stream.put(item)
